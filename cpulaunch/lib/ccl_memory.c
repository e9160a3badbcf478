/*
 * The protocol of the backend "ccl" between ranks of one host: a barrier in shared memory at which ranks compare their
 * next collective, the transfer of small tensors through that memory, and of large ones by process_vm_readv. A rank
 * reads from the memory of other ranks and never writes to it, so a late rank cannot change a tensor of a rank that has
 * given up. What the late rank reads there may be wrong: after its last read it checks whether a rank has given up.
 *
 * cpulaunch/worker/ccl/memory/library.py has the same structures. A function returns at a signal, so that Python can run
 * its handlers, and is then called again. Sources: futex(2), process_vm_readv(2), pidfd_open(2).
 */
#if !defined(__x86_64__) || defined(__ILP32__)
#error "the library of collectives is for x86-64 only: its memory order is not tested on other processors"
#endif
#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define VERSION 3 /* of the interface between library.py and this file: increment it with every change */

struct call { /* a packed call, which the ranks of a group compare */
    uint64_t words[2];
};

/* There are two announcements and payloads: for barriers of even and of odd number, because a rank can be one operation
 * ahead of a rank that still reads its announcement. There are four sleeper flags: a rank can sleep until the last barrier
 * of an operation, which has three, while the rank that it waits for still clears the flag of the first. */
struct slot {           /* a rank's part of the shared memory, which only this rank writes, except for `sleepers` */
    uint32_t count;     /* number of barriers that the rank has reached, modulo 2**32 */
    uint32_t has_left;  /* whether the rank will reach no further barrier */
    uint32_t sleepers[4];
    struct {
        struct call call;
        uint64_t source, result; /* addresses in the rank's process */
    } announcements[2];
    uint64_t reduced; /* bytes of its share that the rank has reduced since it announced its operation */
};
_Static_assert(sizeof(struct slot) == 96, "as in library.py");

struct rank { /* what this process knows of a rank; the process id was verified when the group was set up */
    struct slot *slot;
    uint8_t *payloads[2];
    uint64_t *splits[2]; /* for an all-to-all: bytes for each rank, then bytes from each rank */
    int32_t process, pidfd;
};

struct group { /* one rank's view of its group, filled by library.py */
    const struct rank *ranks;
    uint32_t rank, size;
    uint64_t spin_nanoseconds, poll_nanoseconds, timeout_nanoseconds;
    uint8_t *scratch;
    uint64_t chunk_bytes, payload_bytes;
    uint64_t *copied; /* for each rank: bytes of its share that this rank has copied */
    uint32_t number; /* of the last barrier that this rank has reached */
};

struct reduction { /* numbers of type and operation, as in codes.py; the result is divided by the divisor */
    int32_t type, operation;
    uint32_t divisor;
};

#define NO_RANK (-1)
#define ALL_RANKS (-2)

struct operation { /* a collective of this rank */
    struct call call;
    const uint8_t *source;  /* this rank's tensor */
    uint64_t source_bytes;
    uint64_t largest_bytes; /* of any rank's source; every rank gives the same number */
    /* Reduction, if not null: bytes first to last of all ranks' sources go to `result`. With `shares`, each rank reduces
     * its share of large sources, and `sender` and `target` say which rank copies all shares, and where to. */
    const struct reduction *reduction;
    uint8_t *result;
    uint64_t first, last;
    uint32_t shares;
    /* Copies: `bytes` bytes at the offset of the sender's source go to the target; of ALL_RANKS, one after the other. */
    int32_t sender;
    uint64_t offset, bytes;
    uint8_t *target;
    const uint64_t *splits; /* of an all-to-all, or null */
    /* Progress and outcome */
    uint64_t announced, deadline; /* times of this rank's announcement, and of the end of its wait at the last barrier */
    uint32_t phase, parity; /* of the barrier at which the ranks have announced this operation */
    int32_t failed_rank, other_rank, error;
};

enum place { PAYLOAD, SOURCE, RESULT };
enum outcome { DONE, INTERRUPTED, LEFT, EXITED, LATE, DISAGREES, UNEVEN, UNREADABLE, ABORTED };

int cpulaunch_ccl_version(void) {
    return VERSION;
}

/*
 * Arithmetic. Each function is compiled for several instruction sets; the dynamic linker selects one for the CPU.
 */

#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))

static inline float widened(uint16_t narrow) {
    uint32_t bits = (uint32_t)narrow << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t narrowed(float value) { /* round to nearest, ties to even, as torch does */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Half precision to float and back, without branches, so that compilers vectorize it. Source: IEEE 754, binary16. */
static inline float half_to_float(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, bits, sign = (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f; /* moves the exponent's bias from 15 to 127, also for subnormal numbers */
    memcpy(&bits, &value, sizeof bits);
    bits = (magnitude >= 0x0F800000 ? magnitude | 0x7F800000 : bits) | sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t float_to_half(float value) { /* round to nearest, ties to even */
    uint32_t bits, exponent, rounded;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7FFFFFFF;
    exponent = bits & 0x7F800000;
    if (exponent < 0x38800000)
        exponent = 0x38800000; /* the exponent of the smallest normal half */
    exponent += 0x06800000;    /* adding 2**13 times this power of two rounds at the last bit of a half */
    float shifter, magnitude;
    memcpy(&shifter, &exponent, sizeof shifter);
    memcpy(&magnitude, &bits, sizeof magnitude);
    magnitude += shifter;
    memcpy(&rounded, &magnitude, sizeof rounded);
    rounded = ((exponent - 0x06800000 - 0x38800000) >> 13) + (rounded - exponent);
    rounded = bits >= 0x47800000 ? 0x7C00 : rounded;
    return (uint16_t)(sign | (bits > 0x7F800000 ? 0x7E00 : rounded));
}

#define SAME(value) (value)
#define TRUTH(value) ((value) != 0) /* in torch every byte but 0 is true */
#define SUM(a, b) ((a) + (b))
#define PROD(a, b) ((a) * (b))
/* NaN propagates, as in torch.maximum and torch.minimum; as there, 0.0 and -0.0 count as equal. */
#define MAX(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define MIN(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

typedef void combine(void *result, const void *left, const void *right, uint64_t count); /* result may equal left */
typedef void divide(void *values, uint64_t count, uint32_t divisor);

/* Tensors may have odd addresses, and bytes that the program wrote as another type. */
#define ANYWHERE(TYPE) typedef TYPE TYPE##_anywhere __attribute__((aligned(1), may_alias));
ANYWHERE(int8_t) ANYWHERE(uint8_t) ANYWHERE(uint16_t) ANYWHERE(int32_t)
ANYWHERE(int64_t) ANYWHERE(float) ANYWHERE(double)

#define COMBINE(NAME, STORED, COMPUTED, LOAD, STORE, OPERATION)                                                        \
    FAST static void NAME(void *result, const void *left, const void *right, uint64_t count) {                         \
        STORED##_anywhere *to = result;                                                                                \
        const STORED##_anywhere *first = left, *second = right;                                                        \
        _Pragma("GCC ivdep") for (uint64_t i = 0; i < count; i++) {                                                    \
            COMPUTED a = LOAD(first[i]), b = LOAD(second[i]);                                                          \
            to[i] = (STORED)STORE((COMPUTED)OPERATION(a, b));                                                          \
        }                                                                                                              \
    }
#define ARITHMETIC(NAME, STORED, COMPUTED, LOAD, STORE)                                                                \
    COMBINE(NAME##_sum, STORED, COMPUTED, LOAD, STORE, SUM)                                                            \
    COMBINE(NAME##_prod, STORED, COMPUTED, LOAD, STORE, PROD)                                                          \
    COMBINE(NAME##_max, STORED, COMPUTED, LOAD, STORE, MAX)                                                            \
    COMBINE(NAME##_min, STORED, COMPUTED, LOAD, STORE, MIN)                                                            \
    FAST static void NAME##_divide(void *values, uint64_t count, uint32_t divisor) {                                   \
        STORED##_anywhere *each = values;                                                                              \
        for (uint64_t i = 0; i < count; i++)                                                                           \
            each[i] = (STORED)STORE((COMPUTED)(LOAD(each[i]) / (COMPUTED)divisor));                                    \
    }

ARITHMETIC(int8, int8_t, int, SAME, SAME)
ARITHMETIC(uint8, uint8_t, int, SAME, SAME)
ARITHMETIC(int32, int32_t, int32_t, SAME, SAME)
ARITHMETIC(int64, int64_t, int64_t, SAME, SAME)
ARITHMETIC(float32, float, float, SAME, SAME)
ARITHMETIC(float64, double, double, SAME, SAME)
ARITHMETIC(bfloat16, uint16_t, float, widened, narrowed)
ARITHMETIC(float16, uint16_t, float, half_to_float, float_to_half)
ARITHMETIC(boolean, uint8_t, int, TRUTH, TRUTH)

static const struct arithmetic {
    uint64_t size;
    combine *combine[4];
    divide *divide;
} types[] = {
#define ROW(NAME, SIZE) {SIZE, {NAME##_sum, NAME##_prod, NAME##_max, NAME##_min}, NAME##_divide}
    [0] = ROW(int8, 1),    [1] = ROW(uint8, 1),   [2] = ROW(int32, 4),    [4] = ROW(int64, 8),
    [6] = ROW(float16, 2), [7] = ROW(float32, 4), [8] = ROW(float64, 8),
    [9] = ROW(bfloat16, 2), [10] = ROW(boolean, 1),
};

/*
 * Barrier
 */

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int has_arrived(const struct slot *slot, uint32_t number) { /* counts wrap around */
    return (int32_t)(__atomic_load_n(&slot->count, __ATOMIC_ACQUIRE) - number) >= 0;
}

/* Whether the rank arrives before `*until`, the end of the spin, which the first late rank sets; 0: not set yet. */
static int arrives_soon(const struct group *group, const struct slot *slot, uint64_t *until) {
    if (has_arrived(slot, group->number))
        return 1;
    if (group->spin_nanoseconds == 0)
        return 0;
    if (*until == 0)
        *until = now() + group->spin_nanoseconds;
    do {
        for (int look = 0; look < 16; look++) {
            _mm_pause();
            if (has_arrived(slot, group->number))
                return 1;
        }
    } while (now() < *until);
    return 0;
}

/* A program may have closed the descriptor, and opened another file in its place, of which the kernel says EBADF. Without a
 * descriptor, as on Linux before 5.3, a read of any address says ESRCH if the process has no memory any more. */
static int has_exited(const struct rank *rank) {
    struct pollfd exit = {rank->pidfd, POLLIN, 0};
    uint8_t byte;
    struct iovec here = {&byte, 1}, nowhere = {NULL, 1};
    if (rank->pidfd >= 0 && (syscall(SYS_pidfd_send_signal, rank->pidfd, 0, NULL, 0) == 0 || errno != EBADF))
        return poll(&exit, 1, 0) > 0 && (exit.revents & POLLIN);
    return process_vm_readv(rank->process, &here, 1, &nowhere, 1, 0) < 0 && errno == ESRCH;
}

/* Sleeps until the rank has arrived; returns DONE, or why it does not arrive. */
static enum outcome await_rank(const struct group *group, const struct rank *rank, uint64_t deadline) {
    struct slot *slot = rank->slot;
    int exited = 0;
    for (;;) {
        /* Read before the count: the rank may arrive, and then leave or exit, in between. */
        int left = (int)__atomic_load_n(&slot->has_left, __ATOMIC_ACQUIRE);
        uint32_t seen = __atomic_load_n(&slot->count, __ATOMIC_ACQUIRE);
        if ((int32_t)(seen - group->number) >= 0)
            return DONE;
        if (left || exited)
            return left ? LEFT : EXITED;
        if (__atomic_load_n(&group->ranks[group->rank].slot->has_left, __ATOMIC_ACQUIRE))
            return ABORTED; /* by another thread of this process */
        uint64_t time = now(), left_over = deadline > time ? deadline - time : 0;
        if (left_over == 0)
            return LATE;
        uint64_t sleep = left_over < group->poll_nanoseconds ? left_over : group->poll_nanoseconds;
        struct timespec interval = {(time_t)(sleep / 1000000000u), (long)(sleep % 1000000000u)};
        __atomic_store_n(&slot->sleepers[group->number & 3], 1, __ATOMIC_SEQ_CST); /* see arrive */
        if (syscall(SYS_futex, &slot->count, FUTEX_WAIT, seen, &interval, NULL, 0) == 0 || errno == EAGAIN)
            continue;
        int interrupted = errno == EINTR;
        exited = has_exited(rank); /* after a signal too: one each interval would end all sleeps before their time */
        if (interrupted && !exited)
            return INTERRUPTED;
    }
}

/* Waits until all ranks have reached the barrier; returns DONE, or another outcome and sets failed_rank. */
static enum outcome await_all(const struct group *group, struct operation *operation) {
    uint64_t until = 0;
    for (uint32_t step = 1; step < group->size; step++) {
        uint32_t other = (group->rank + step) % group->size;
        const struct rank *rank = &group->ranks[other];
        enum outcome outcome =
            arrives_soon(group, rank->slot, &until) ? DONE : await_rank(group, rank, operation->deadline);
        operation->failed_rank = (int32_t)other;
        if (outcome != DONE)
            return outcome;
    }
    return DONE;
}

/* Announces that this rank has reached the next barrier; returns the time. The store of the count comes
 * after all that this rank has written and read. It and the load of the flag are in one total order with the store of the
 * flag and futex's load of the count in await_rank: this rank sees the flag, or the other one the count. */
static uint64_t arrive(struct group *group, struct operation *operation) {
    struct slot *mine = group->ranks[group->rank].slot;
    uint32_t number = ++group->number;
    uint64_t time = now();
    operation->deadline = time + group->timeout_nanoseconds;
    __atomic_store_n(&mine->count, number, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&mine->sleepers[number & 3], __ATOMIC_SEQ_CST)) {
        __atomic_store_n(&mine->sleepers[number & 3], 0, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &mine->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
    return time;
}

/* Effect: ranks that wait for this one, now or later, fail because it has left the group. One that is about to sleep just
 * now notices after poll_nanoseconds, because the count does not change. */
void cpulaunch_ccl_leave(const struct group *group) {
    struct slot *mine = group->ranks[group->rank].slot;
    __atomic_store_n(&mine->has_left, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &mine->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/*
 * Transfers
 */

/* Copies bytes at an offset of what the rank has announced; returns DONE or UNREADABLE. */
static enum outcome read_rank(const struct group *group, struct operation *operation, uint32_t other, enum place place,
                              uint64_t offset, void *target, uint64_t bytes) {
    const struct rank *rank = &group->ranks[other];
    uint32_t parity = operation->parity;
    uint64_t address = place == RESULT ? rank->slot->announcements[parity].result
                                       : rank->slot->announcements[parity].source;
    if (bytes > 0 && place == PAYLOAD)
        memcpy(target, rank->payloads[parity] + offset, bytes);
    else if (bytes > 0 && other == group->rank)
        memmove(target, (const void *)(address + offset), bytes);
    else
        for (uint64_t done = 0; done < bytes;) {
            struct iovec here = {(uint8_t *)target + done, bytes - done};
            struct iovec there = {(void *)(address + offset + done), bytes - done};
            ssize_t copied = process_vm_readv(rank->process, &here, 1, &there, 1, 0);
            if (copied <= 0) {
                operation->failed_rank = (int32_t)other;
                operation->error = copied < 0 && errno != 0 ? errno : EFAULT;
                return UNREADABLE;
            }
            done += (uint64_t)copied;
        }
    return DONE;
}

static void finish(const struct reduction *how, uint8_t *result, const uint8_t *reduced, uint64_t bytes) {
    const struct arithmetic *type = &types[how->type];
    if (reduced != result)
        memcpy(result, reduced, bytes);
    if (how->divisor > 1)
        type->divide(result, bytes / type->size, how->divisor);
}

/* Reduces bytes `first` to `last` of all payloads, in rank order. */
static void reduce_small(const struct group *group, const struct operation *operation) {
    const struct reduction *how = operation->reduction;
    const struct arithmetic *type = &types[how->type];
    uint64_t first = operation->first, bytes = operation->last - first;
    const uint8_t *left = group->ranks[0].payloads[operation->parity] + first;
    for (uint32_t other = 1; other < group->size; other++) {
        const uint8_t *right = group->ranks[other].payloads[operation->parity] + first;
        type->combine[how->operation](operation->result, left, right, bytes / type->size);
        left = operation->result;
    }
    if (bytes > 0)
        finish(how, operation->result, left, bytes);
}

#define ALIGNED_BYTES 512 /* of shares: no two ranks write to the same cache line */

/* The first byte of a rank's share of `bytes` bytes. */
static uint64_t share_start(const struct group *group, uint32_t rank, uint64_t bytes) {
    uint64_t blocks = (bytes + ALIGNED_BYTES - 1) / ALIGNED_BYTES;
    uint64_t start = blocks * rank / group->size * ALIGNED_BYTES;
    return rank == group->size || start > bytes ? bytes : start;
}

/* Copies what other ranks have reduced of their shares to the target, while it is in a cache; sets `*missing`, the number
 * of ranks whose shares are not complete yet. */
static enum outcome copy_shares(const struct group *group, struct operation *operation, uint32_t *missing) {
    *missing = 0;
    for (uint32_t step = 1; step < group->size && operation->sender == ALL_RANKS; step++) {
        uint32_t other = (group->rank + step) % group->size;
        uint64_t start = share_start(group, other, operation->source_bytes), done = group->copied[other];
        uint64_t bytes = share_start(group, other + 1, operation->source_bytes) - start;
        uint64_t reduced = __atomic_load_n(&group->ranks[other].slot->reduced, __ATOMIC_ACQUIRE);
        reduced = reduced < bytes ? reduced : bytes;
        if (reduced > done) {
            uint8_t *target = operation->target + start + done;
            enum outcome outcome = read_rank(group, operation, other, RESULT, start + done, target, reduced - done);
            if (outcome != DONE)
                return outcome;
            group->copied[other] = reduced;
        }
        *missing += reduced < bytes;
    }
    return DONE;
}

/* Reduces bytes `first` to `last` of all sources, chunk by chunk, each starting with the next rank's. */
static enum outcome reduce_large(const struct group *group, struct operation *operation) {
    const struct reduction *how = operation->reduction;
    const struct arithmetic *type = &types[how->type];
    for (uint64_t start = operation->first; start < operation->last; start += group->chunk_bytes) {
        uint64_t rest = operation->last - start, bytes = rest < group->chunk_bytes ? rest : group->chunk_bytes;
        uint8_t *result = operation->result + (start - operation->first);
        const uint8_t *left = operation->source + start;
        for (uint32_t step = 1; step < group->size; step++) {
            uint32_t other = (group->rank + step) % group->size;
            enum outcome outcome = read_rank(group, operation, other, SOURCE, start, group->scratch, bytes);
            if (outcome != DONE)
                return outcome;
            type->combine[how->operation](result, left, group->scratch, bytes / type->size);
            left = result;
        }
        finish(how, result, left, bytes);
        if (!operation->shares)
            continue;
        uint32_t missing;
        __atomic_store_n(&group->ranks[group->rank].slot->reduced, start + bytes - operation->first, __ATOMIC_RELEASE);
        enum outcome outcome = copy_shares(group, operation, &missing);
        if (outcome != DONE)
            return outcome;
    }
    return DONE;
}

/* Copies the rest of the shares while the other ranks reduce them; sets `*missing` if they are too slow for a spin. */
static enum outcome copy_soon(const struct group *group, struct operation *operation, uint32_t *missing) {
    uint64_t until = now() + group->spin_nanoseconds;
    enum outcome outcome;
    uint32_t before = 0;
    do {
        outcome = copy_shares(group, operation, missing);
        if (*missing != before)
            until = now() + group->spin_nanoseconds;
        before = *missing;
        _mm_pause();
    } while (outcome == DONE && *missing > 0 && now() < until);
    return outcome;
}

/* Copies from the sources of the senders. */
static enum outcome copy_sources(const struct group *group, struct operation *operation, enum place place) {
    enum outcome outcome = DONE;
    for (uint32_t step = 1; step <= group->size && outcome == DONE; step++) {
        uint32_t other = (group->rank + step) % group->size;
        uint8_t *target = operation->target + (operation->sender == ALL_RANKS ? other * operation->bytes : 0);
        if (operation->sender == ALL_RANKS || operation->sender == (int32_t)other)
            outcome = read_rank(group, operation, other, place, operation->offset, target, operation->bytes);
    }
    return outcome;
}

/*
 * All-to-all
 */

static uint64_t sum(const uint64_t *splits, uint32_t count) {
    uint64_t total = 0;
    for (uint32_t rank = 0; rank < count; rank++)
        total += splits[rank];
    return total;
}

/* Checks that each rank expects what the others send. Sets largest_bytes, or failed_rank (the sender) and other_rank. */
static enum outcome compare_splits(const struct group *group, struct operation *operation) {
    operation->largest_bytes = 0;
    for (uint32_t sender = 0; sender < group->size; sender++) {
        const uint64_t *sent = group->ranks[sender].splits[operation->parity];
        uint64_t bytes = sum(sent, group->size);
        if (bytes > operation->largest_bytes)
            operation->largest_bytes = bytes;
        for (uint32_t receiver = 0; receiver < group->size; receiver++)
            if (sent[receiver] != group->ranks[receiver].splits[operation->parity][group->size + sender]) {
                operation->failed_rank = (int32_t)sender, operation->other_rank = (int32_t)receiver;
                return UNEVEN;
            }
    }
    return DONE;
}

/* Copies this rank's part of every source. */
static enum outcome copy_splits(const struct group *group, struct operation *operation) {
    const uint64_t *expected = operation->splits + group->size;
    enum outcome outcome = DONE;
    for (uint32_t step = 1; step <= group->size && outcome == DONE; step++) {
        uint32_t other = (group->rank + step) % group->size;
        const uint64_t *sent = group->ranks[other].splits[operation->parity];
        enum place place = sum(sent, group->size) <= group->payload_bytes ? PAYLOAD : SOURCE;
        outcome = read_rank(group, operation, other, place, sum(sent, group->rank),
                            operation->target + sum(expected, other), sent[group->rank]);
    }
    return outcome;
}

/*
 * Operations
 */

/* Publishes this rank's call and its tensor, or the tensor's address. */
static void announce(struct group *group, struct operation *operation) {
    const struct rank *mine = &group->ranks[group->rank];
    uint32_t parity = operation->parity = (group->number + 1) & 1;
    uint64_t bytes = operation->splits != NULL ? operation->source_bytes : operation->largest_bytes;
    if (bytes <= group->payload_bytes && operation->source_bytes > 0)
        memcpy(mine->payloads[parity], operation->source, operation->source_bytes);
    if (operation->splits != NULL)
        memcpy(mine->splits[parity], operation->splits, 2 * group->size * sizeof *operation->splits);
    __atomic_store_n(&mine->slot->reduced, 0, __ATOMIC_RELAXED);
    for (uint32_t other = 0; other < group->size; other++)
        group->copied[other] = 0;
    mine->slot->announcements[parity].call = operation->call;
    mine->slot->announcements[parity].source = (uint64_t)operation->source;
    mine->slot->announcements[parity].result = (uint64_t)operation->result - operation->first;
    operation->announced = arrive(group, operation);
}

/* Returns DONE if all ranks have announced the same call; else sets failed_rank. */
static enum outcome compare(const struct group *group, struct operation *operation) {
    for (uint32_t other = 0; other < group->size; other++) {
        const struct call *theirs = &group->ranks[other].slot->announcements[operation->parity].call;
        if (memcmp(theirs, &operation->call, sizeof *theirs) != 0) {
            operation->failed_rank = (int32_t)other;
            return DISAGREES;
        }
    }
    return operation->splits != NULL ? compare_splits(group, operation) : DONE;
}

#define DEFAULT_MODE 0x1F80 /* of floating-point arithmetic when a process starts. Source: Intel SDM, MXCSR */

/* Reduces and copies after the first barrier. */
static enum outcome transfer(const struct group *group, struct operation *operation) {
    int is_small = operation->largest_bytes <= group->payload_bytes;
    if (operation->splits != NULL)
        return copy_splits(group, operation);
    if (operation->reduction == NULL)
        return copy_sources(group, operation, is_small ? PAYLOAD : SOURCE);
    /* The program may have told this thread alone to count subnormal numbers as zero (torch.set_flush_denormal), but all
     * ranks must compute the same. */
    unsigned int mode = _mm_getcsr();
    _mm_setcsr(DEFAULT_MODE);
    enum outcome outcome = DONE;
    if (is_small)
        reduce_small(group, operation);
    else
        outcome = reduce_large(group, operation);
    _mm_setcsr(mode);
    return outcome;
}

/*
 * Whether all tensors were as announced until now, after this rank's last read. A rank that gives up says so before its
 * program can change a tensor, perhaps while it waits at the barrier that this rank is about to reach. One that exited
 * is noticed by the read, except if its process id is in use again, which takes longer than poll_nanoseconds. If it exited
 * before this rank's announcement, it never reaches the last barrier, which other ranks reach after that only.
 */
static enum outcome check_read(const struct group *group, struct operation *operation) {
    int is_slow = now() > operation->announced + group->poll_nanoseconds;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (uint32_t other = 0; other < group->size; other++) {
        const struct rank *rank = &group->ranks[other];
        operation->failed_rank = (int32_t)other;
        if (__atomic_load_n(&rank->slot->has_left, __ATOMIC_ACQUIRE))
            return other == group->rank ? ABORTED : LEFT;
        if (is_slow && has_exited(rank))
            return EXITED;
    }
    return DONE;
}

enum phase { ANNOUNCE, MEET, REDUCED, READ };

/*
 * Runs the operation, whose phase is 0, or continues it after INTERRUPTED. Large operations end with a barrier, so that
 * no rank changes a tensor that another still reads.
 */
int cpulaunch_ccl_run(struct group *group, struct operation *operation) {
    enum outcome outcome = DONE;
    uint32_t missing = 1;
    if (operation->phase == ANNOUNCE) {
        announce(group, operation);
        operation->phase = MEET;
    }
    if (operation->phase == MEET) {
        if ((outcome = await_all(group, operation)) != DONE || (outcome = compare(group, operation)) != DONE ||
            (outcome = transfer(group, operation)) != DONE || operation->largest_bytes <= group->payload_bytes)
            return (int)outcome;
        operation->phase = REDUCED;
        if (operation->shares) {
            arrive(group, operation);
            if ((outcome = copy_soon(group, operation, &missing)) != DONE)
                return (int)outcome;
        }
    }
    if (operation->phase == REDUCED) {
        if (operation->shares && missing > 0 &&
            ((outcome = await_all(group, operation)) != DONE ||
             (outcome = copy_shares(group, operation, &missing)) != DONE))
            return (int)outcome;
        if ((outcome = check_read(group, operation)) != DONE)
            return (int)outcome;
        operation->phase = READ;
        arrive(group, operation);
    }
    return (int)await_all(group, operation);
}

/* Reduces the `bytes` bytes at the address over all ranks. */
int cpulaunch_ccl_all_reduce(struct group *group, struct operation *operation, const struct call *call, void *address,
                             uint64_t bytes, const struct reduction *reduction) {
    int is_small = bytes <= group->payload_bytes;
    uint64_t first = is_small ? 0 : share_start(group, group->rank, bytes);
    uint64_t last = is_small ? bytes : share_start(group, group->rank + 1, bytes);
    *operation = (struct operation){
        .call = *call, .source = address, .source_bytes = bytes, .largest_bytes = bytes, .reduction = reduction,
        .result = (uint8_t *)address + first, .first = first, .last = last, .shares = !is_small,
        .sender = ALL_RANKS, .target = address,
    };
    return cpulaunch_ccl_run(group, operation);
}

/* This rank's share of `bytes` bytes: its first byte; of the next rank, its last. */
uint64_t cpulaunch_ccl_share_start(const struct group *group, uint32_t rank, uint64_t bytes) {
    return share_start(group, rank, bytes);
}
