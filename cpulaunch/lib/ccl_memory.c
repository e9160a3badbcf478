/*
 * The protocol of the backend "ccl" between ranks of one host: tensors pass through memory that all ranks share, in pieces
 * that fit into caches, and a barrier after each step tells that its data are there. A rank writes only to its own part of
 * that memory and to its own tensors: a late rank cannot change a tensor of a rank that has given up.
 *
 * cpulaunch/worker/ccl/memory/library.py has the same structures. A function returns at a signal, and after some pieces,
 * so that Python can run handlers, and is then called again. Sources: futex(2), pidfd_open(2).
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

#define VERSION 5 /* of the interface between library.py and this file: increment it with every change */

struct call { /* a packed call, which the ranks of a group compare */
    uint64_t words[2];
};

/* There are two of each for pieces of even and of odd number, because a rank can be one piece ahead of a rank that still
 * reads the last one; and two sleeper flags for barriers of even and odd number, because a rank can sleep until a barrier
 * while the rank that it waits for still clears the flag of the barrier before. */
struct slot {           /* a rank's part of the shared memory, which only this rank writes, except for `sleepers` */
    uint32_t count;     /* number of barriers that the rank has reached, modulo 2**32 */
    uint32_t has_left;  /* whether the rank will reach no further barrier */
    uint32_t sleepers[2];
    struct call announcements[2];
};
_Static_assert(sizeof(struct slot) == 48, "as in library.py");

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
    uint64_t payload_bytes, piece_bytes; /* of a payload; of a piece of a tensor that does not fit into a payload */
    uint32_t number; /* of the last barrier that this rank has reached */
    uint32_t piece;  /* of the last piece that this rank has announced */
};

struct reduction { /* numbers of type and operation, as in reductions.py; the result is divided by the divisor */
    int32_t type, operation;
    uint32_t divisor;
};

#define ALL_RANKS (-2)

/* A collective of this rank. A source has one block for all ranks, or, if it scatters, a block for each. Targets have a
 * block of each sender, or, of a reduction, one. */
struct operation {
    struct call call;
    const uint8_t *source; /* this rank's tensor, or null if it sends nothing */
    uint8_t *target;       /* or null if this rank receives nothing */
    uint64_t bytes;        /* of a block; the same in all ranks. Of an all-to-all compare sets the largest */
    const struct reduction *reduction; /* or null */
    const uint64_t *splits;            /* of an all-to-all, or null */
    int32_t sender;                    /* a rank or ALL_RANKS */
    uint32_t scatters;
    /* Progress and outcome */
    uint64_t done, deadline; /* bytes of a block; the end of the wait at the next barrier */
    uint32_t phase, parity;  /* of the piece */
    int32_t failed_rank, other_rank;
};

enum outcome { DONE, INTERRUPTED, LEFT, EXITED, LATE, DISAGREES, UNEVEN, ABORTED };

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

static const struct arithmetic {
    uint64_t size;
    combine *combine[4];
    divide *divide;
} types[] = {
#define ROW(NAME, SIZE) {SIZE, {NAME##_sum, NAME##_prod, NAME##_max, NAME##_min}, NAME##_divide}
    [0] = ROW(int8, 1),    [1] = ROW(uint8, 1),   [2] = ROW(int32, 4),    [4] = ROW(int64, 8),
    [6] = ROW(float16, 2), [7] = ROW(float32, 4), [8] = ROW(float64, 8),
    [9] = ROW(bfloat16, 2),
};

/*
 * Barrier
 */

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

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

/* Whether another thread has made this rank leave the group: the program may use the tensors from now on. */
static int is_aborted(const struct group *group) {
    return (int)__atomic_load_n(&group->ranks[group->rank].slot->has_left, __ATOMIC_ACQUIRE);
}

/* Whether a rank that has not reached the barrier never will: DONE if all may, else why not, and sets failed_rank. Ranks
 * leave when they lose one, so one that has exited, which only the kernel knows, is named before those that have left. */
static enum outcome find_lost(const struct group *group, struct operation *operation, int asks_kernel) {
    enum outcome outcome = DONE;
    for (uint32_t other = 0; other < group->size && outcome != EXITED; other++) {
        const struct rank *rank = &group->ranks[other];
        if (other == group->rank || has_arrived(rank->slot, group->number))
            continue;
        int left = (int)__atomic_load_n(&rank->slot->has_left, __ATOMIC_ACQUIRE);
        /* The count is read again after this: the rank may have arrived, and then have left or exited, in between. */
        if ((left || (asks_kernel && has_exited(rank))) && !has_arrived(rank->slot, group->number)) {
            outcome = left ? LEFT : EXITED;
            operation->failed_rank = (int32_t)other;
        }
    }
    return outcome == LEFT && !asks_kernel ? find_lost(group, operation, 1) : outcome;
}

/* Sleeps until the rank has arrived; returns DONE, or why it or another one does not arrive, and sets failed_rank. */
static enum outcome await_rank(const struct group *group, uint32_t awaited, struct operation *operation) {
    struct slot *slot = group->ranks[awaited].slot;
    for (int asks_kernel = 0;;) {
        uint32_t seen = __atomic_load_n(&slot->count, __ATOMIC_ACQUIRE);
        if ((int32_t)(seen - group->number) >= 0)
            return DONE;
        if (is_aborted(group))
            return ABORTED;
        enum outcome outcome = find_lost(group, operation, asks_kernel);
        if (asks_kernel || outcome != DONE) /* also after the interval: a signal before the sleep has not ended it */
            return outcome != DONE ? outcome : INTERRUPTED;
        uint64_t time = now(), left_over = operation->deadline > time ? operation->deadline - time : 0;
        operation->failed_rank = (int32_t)awaited;
        if (left_over == 0)
            return LATE;
        uint64_t sleep = least(left_over, group->poll_nanoseconds);
        struct timespec interval = {(time_t)(sleep / 1000000000u), (long)(sleep % 1000000000u)};
        __atomic_store_n(&slot->sleepers[group->number & 1], 1, __ATOMIC_SEQ_CST); /* see arrive */
        /* After a signal too, as one each interval would end all sleeps before their time. */
        asks_kernel = syscall(SYS_futex, &slot->count, FUTEX_WAIT, seen, &interval, NULL, 0) != 0 && errno != EAGAIN;
    }
}

/* Waits until all ranks have reached the barrier; returns DONE, or another outcome and sets failed_rank. */
static enum outcome await_all(const struct group *group, struct operation *operation) {
    uint64_t until = 0;
    for (uint32_t step = 1; step < group->size; step++) {
        uint32_t other = (group->rank + step) % group->size;
        enum outcome outcome =
            arrives_soon(group, group->ranks[other].slot, &until) ? DONE : await_rank(group, other, operation);
        if (outcome != DONE)
            return outcome;
    }
    return is_aborted(group) ? ABORTED : DONE;
}

/* Tells that this rank has reached the next barrier. The store of the count comes after all that this rank has written
 * and read. It and the load of the flag are in one total order with the store of the flag and futex's load of the count in
 * await_rank: this rank sees the flag, or the other one the count. Returns DONE; or ABORTED, so that no piece is
 * published that the program may have changed since the abort. */
static enum outcome arrive(struct group *group, struct operation *operation) {
    struct slot *mine = group->ranks[group->rank].slot;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (is_aborted(group))
        return ABORTED;
    uint32_t number = ++group->number;
    operation->deadline = now() + group->timeout_nanoseconds;
    __atomic_store_n(&mine->count, number, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&mine->sleepers[number & 1], __ATOMIC_SEQ_CST)) {
        __atomic_store_n(&mine->sleepers[number & 1], 0, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &mine->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
    return DONE;
}

/* Effect: ranks that wait for this one, now or later, fail because it has left the group. One that is about to sleep just
 * now notices after poll_nanoseconds, because the count does not change. */
void cpulaunch_ccl_leave(const struct group *group) {
    struct slot *mine = group->ranks[group->rank].slot;
    __atomic_store_n(&mine->has_left, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &mine->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/*
 * Pieces
 */

#define ALIGNED_BYTES 512 /* of shares and blocks: no two ranks write to the same cache line */

/* The largest number of bytes of a block that are in one piece. */
static uint64_t step_bytes(const struct group *group, const struct operation *operation) {
    if (operation->scatters)
        return least(group->payload_bytes / group->size / ALIGNED_BYTES * ALIGNED_BYTES, group->piece_bytes);
    return operation->bytes <= group->payload_bytes ? group->payload_bytes : group->piece_bytes;
}

/* Whether each rank reduces its share of a piece for all, instead of all of it for itself. */
static int has_shares(const struct group *group, const struct operation *operation) {
    return operation->reduction != NULL && !operation->scatters && operation->bytes > group->payload_bytes;
}

/* Bytes of the piece in a block of `bytes` bytes. */
static uint64_t piece_bytes(const struct group *group, const struct operation *operation, uint64_t bytes) {
    return bytes > operation->done ? least(bytes - operation->done, step_bytes(group, operation)) : 0;
}

struct span {
    uint64_t start, bytes;
};

/* A rank's share of the piece. */
static struct span share_of(const struct group *group, const struct operation *operation, uint32_t rank) {
    uint64_t bytes = piece_bytes(group, operation, operation->bytes);
    uint64_t blocks = (bytes + ALIGNED_BYTES - 1) / ALIGNED_BYTES;
    uint64_t start = least(blocks * rank / group->size * ALIGNED_BYTES, bytes);
    return (struct span){start, least(blocks * (rank + 1) / group->size * ALIGNED_BYTES, bytes) - start};
}

/* The piece of block number `rank` of a tensor whose blocks have the sizes in `splits`, or are of one size. */
static struct span piece_of(const struct group *group, const struct operation *operation, const uint64_t *splits,
                            uint32_t rank) {
    uint64_t start = rank * operation->bytes, bytes = operation->bytes;
    if (splits != NULL) {
        start = 0, bytes = splits[rank];
        for (uint32_t before = 0; before < rank; before++)
            start += splits[before];
    }
    return (struct span){start + operation->done, piece_bytes(group, operation, bytes)};
}

static void copy(uint8_t *target, const uint8_t *source, uint64_t bytes) {
    if (bytes > 0 && target != source)
        memmove(target, source, bytes);
}

/* Copies the piece from this rank's source to its payload; without its own share, which no other rank reads. */
static void fill(const struct group *group, const struct operation *operation) {
    uint8_t *payload = group->ranks[group->rank].payloads[operation->parity];
    int has_share = has_shares(group, operation);
    for (uint32_t rank = 0; rank < group->size && operation->source != NULL; rank++)
        if (has_share && rank != group->rank) {
            struct span share = share_of(group, operation, rank);
            copy(payload + share.start, operation->source + operation->done + share.start, share.bytes);
        } else if (!has_share && (rank == 0 || operation->scatters)) {
            struct span piece = piece_of(group, operation, operation->splits, rank);
            copy(payload + rank * step_bytes(group, operation), operation->source + piece.start, piece.bytes);
        }
}

/* Copies the piece from the payloads of the senders, or all ranks' shares of it, to this rank's target: first from this
 * rank's own, which is still in its cache. */
static void drain(const struct group *group, const struct operation *operation) {
    const uint64_t *splits = operation->splits != NULL ? operation->splits + group->size : NULL;
    uint64_t offset = operation->scatters ? group->rank * step_bytes(group, operation) : 0;
    for (uint32_t step = 0; step < group->size && operation->target != NULL; step++) {
        uint32_t other = (group->rank + step) % group->size;
        const uint8_t *payload = group->ranks[other].payloads[operation->parity];
        if (has_shares(group, operation)) {
            struct span share = share_of(group, operation, other);
            copy(operation->target + operation->done + share.start, payload + share.start, share.bytes);
        } else if (operation->sender == ALL_RANKS || operation->sender == (int32_t)other) {
            struct span piece = piece_of(group, operation, splits, operation->sender == ALL_RANKS ? other : 0);
            copy(operation->target + piece.start, payload + offset, piece.bytes);
        }
    }
}

#define DEFAULT_MODE 0x1F80 /* of floating-point arithmetic when a process starts. Source: Intel SDM, MXCSR */

/* Reduces the piece, or this rank's share of it, which stays in its payload. */
static void reduce(const struct group *group, const struct operation *operation) {
    const struct reduction *how = operation->reduction;
    const struct arithmetic *type = &types[how->type];
    uint64_t offset = operation->scatters ? group->rank * step_bytes(group, operation) : 0;
    struct span part = {offset, piece_bytes(group, operation, operation->bytes)};
    uint32_t first = 0;
    uint8_t *result = operation->target != NULL ? operation->target + operation->done : NULL;
    const uint8_t *left = group->ranks[first].payloads[operation->parity] + part.start;
    if (has_shares(group, operation)) {
        first = group->rank;
        part = share_of(group, operation, first);
        result = group->ranks[first].payloads[operation->parity] + part.start;
        left = operation->source + operation->done + part.start;
    }
    if (result == NULL)
        return;
    /* The program may have told this thread alone to count subnormal numbers as zero (torch.set_flush_denormal), but all
     * ranks must compute the same. */
    unsigned int mode = _mm_getcsr();
    _mm_setcsr(DEFAULT_MODE);
    for (uint32_t step = 1; step < group->size; step++) {
        const uint8_t *right = group->ranks[(first + step) % group->size].payloads[operation->parity] + part.start;
        type->combine[how->operation](result, left, right, part.bytes / type->size);
        left = result;
    }
    copy(result, left, part.bytes);
    if (how->divisor > 1)
        type->divide(result, part.bytes / type->size, how->divisor);
    _mm_setcsr(mode);
}

/*
 * Operations
 */

/* Returns DONE if all ranks have announced the same call, and each expects what the others send; else sets failed_rank
 * and other_rank (of an all-to-all: the sender and the receiver). */
static enum outcome compare(const struct group *group, struct operation *operation) {
    uint32_t parity = operation->parity, size = group->size;
    for (uint32_t other = 0; other < size; other++) {
        operation->failed_rank = (int32_t)other;
        if (memcmp(&group->ranks[other].slot->announcements[parity], &operation->call, sizeof operation->call) != 0)
            return DISAGREES;
    }
    for (uint32_t pair = 0; pair < size * size && operation->splits != NULL; pair++) {
        uint32_t sender = pair / size, receiver = pair % size;
        uint64_t sent = group->ranks[sender].splits[parity][receiver];
        operation->failed_rank = (int32_t)sender, operation->other_rank = (int32_t)receiver;
        if (sent != group->ranks[receiver].splits[parity][size + sender])
            return UNEVEN;
        if (sent > operation->bytes)
            operation->bytes = sent;
    }
    return DONE;
}

/* Publishes this rank's piece, with its call if it is the first one; returns as arrive. */
static enum outcome announce(struct group *group, struct operation *operation) {
    const struct rank *mine = &group->ranks[group->rank];
    operation->parity = ++group->piece & 1;
    fill(group, operation);
    if (operation->done == 0) {
        mine->slot->announcements[operation->parity] = operation->call;
        if (operation->splits != NULL)
            memcpy(mine->splits[operation->parity], operation->splits, 2 * group->size * sizeof *operation->splits);
    }
    return arrive(group, operation);
}

enum phase { ANNOUNCE, MEET, REDUCED };

/* Runs the operation, whose phase is 0, or continues it after INTERRUPTED. */
int cpulaunch_ccl_run(struct group *group, struct operation *operation) {
    enum outcome outcome = DONE;
    uint64_t end = now() + group->poll_nanoseconds; /* then Python may run handlers: without late ranks, none sleeps */
    do {
        if (operation->phase == ANNOUNCE) {
            if ((outcome = announce(group, operation)) != DONE)
                return (int)outcome;
            operation->phase = MEET;
        }
        if (operation->phase == MEET) {
            if ((outcome = await_all(group, operation)) != DONE ||
                (operation->done == 0 && (outcome = compare(group, operation)) != DONE))
                return (int)outcome;
            if (operation->reduction == NULL)
                drain(group, operation);
            else
                reduce(group, operation);
            if (has_shares(group, operation) && (outcome = arrive(group, operation)) != DONE)
                return (int)outcome;
            operation->phase = REDUCED;
        }
        if (has_shares(group, operation)) {
            if ((outcome = await_all(group, operation)) != DONE)
                return (int)outcome;
            drain(group, operation);
        }
        operation->done += step_bytes(group, operation);
        operation->phase = ANNOUNCE;
    } while (operation->done < operation->bytes && now() < end);
    return operation->done < operation->bytes ? INTERRUPTED : DONE;
}

/* Reduces the `bytes` bytes at the address over all ranks. */
int cpulaunch_ccl_all_reduce(struct group *group, struct operation *operation, const struct call *call, void *address,
                             uint64_t bytes, const struct reduction *reduction) {
    *operation = (struct operation){.call = *call, .source = address, .target = address, .bytes = bytes,
                                    .reduction = reduction, .sender = ALL_RANKS};
    return cpulaunch_ccl_run(group, operation);
}
