/*
 * The native part of the memory path of the backend "ccl", for ranks on one host: the shared barrier, the reduction of
 * small tensors through shared memory, and the reduction of large tensors in the memory of the ranks' processes.
 *
 * cpulaunch/worker/ccl/memory/native.py calls these functions. shared_barrier.py and path.py beside it do the same in
 * Python, slower, where the compiled library is missing; a group may mix ranks of both kinds, so the layout of the
 * shared memory is that of shared_barrier.py. The code relies on x86-64, where other CPUs see stores in program order.
 * Sources: futex(2), process_vm_readv(2).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define VERSION 1 /* of the interface between native.py and this file: increment it with every change */

struct call { /* a packed call, which the ranks of a group compare */
    uint64_t words[2];
};

struct slot { /* a rank's part of the shared memory: Slot in shared_barrier.py */
    uint32_t count, unused;
    int32_t process;
    uint32_t has_left;
    uint32_t sleepers[2];
    uint32_t unused_too[2];
    struct {
        struct call call;
        uint64_t values[2];
    } announcements[2];
};
_Static_assert(offsetof(struct slot, announcements) == 32 && sizeof(struct slot) == 96, "as in shared_barrier.py");

struct rank_memory { /* the addresses of a rank's slot and of its two payloads */
    struct slot *slot;
    uint8_t *payloads[2];
};

struct barrier { /* one rank's view of its group's barrier, filled by native.py */
    const struct rank_memory *ranks;
    uint32_t rank, size;
    uint64_t spin_nanoseconds, poll_nanoseconds;
    uint8_t *scratch; /* room for two chunks */
    uint64_t chunk_bytes;
};

struct reduction { /* oneCCL's numbers of type and operation, as in codes.py; the result is divided by the divisor */
    int32_t type, operation;
    uint32_t divisor;
};

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

#define SAME(value) (value)
#define SUM(a, b) ((a) + (b))
#define PROD(a, b) ((a) * (b))
/* NaN propagates, as in torch.maximum and torch.minimum; as there, 0.0 and -0.0 count as equal. */
#define MAX(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define MIN(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

typedef void combine(void *result, const void *left, const void *right, uint64_t count); /* result may equal left */
typedef void divide(void *values, uint64_t count, uint32_t divisor);

#define COMBINE(NAME, STORED, COMPUTED, LOAD, STORE, OPERATION)                                                        \
    FAST static void NAME(void *result, const void *left, const void *right, uint64_t count) {                         \
        STORED *to = result;                                                                                           \
        const STORED *first = left, *second = right;                                                                   \
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
        STORED *each = values;                                                                                         \
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

static const struct arithmetic {
    uint64_t size;
    combine *combine[4];
    divide *divide;
} types[] = {
#define ROW(NAME, SIZE) {SIZE, {NAME##_sum, NAME##_prod, NAME##_max, NAME##_min}, NAME##_divide}
    [0] = ROW(int8, 1),    [1] = ROW(uint8, 1),   [2] = ROW(int32, 4),    [4] = ROW(int64, 8),
    [7] = ROW(float32, 4), [8] = ROW(float64, 8), [9] = ROW(bfloat16, 2),
};

int cpulaunch_ccl_knows(int type) {
    return type >= 0 && (size_t)type < sizeof types / sizeof *types && types[type].size != 0;
}

/*
 * Barrier
 */

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static uint32_t count_of(const struct slot *slot) {
    return __atomic_load_n(&slot->count, __ATOMIC_ACQUIRE);
}

/* Counts wrap around at 2**32. */
static int has_arrived(uint32_t count, uint32_t number) {
    return (int32_t)(count - number) >= 0;
}

/* Whether the rank arrives before `*until`, the end of the spin, which the first late rank sets; 0: not set yet. */
static int arrives_soon(const struct barrier *barrier, const struct slot *slot, uint32_t number, uint64_t *until) {
    if (has_arrived(count_of(slot), number))
        return 1;
    if (barrier->spin_nanoseconds == 0)
        return 0;
    if (*until == 0)
        *until = now() + barrier->spin_nanoseconds;
    do {
        for (int look = 0; look < 16; look++) {
            _mm_pause();
            if (has_arrived(count_of(slot), number))
                return 1;
        }
    } while (now() < *until);
    return 0;
}

/* Sleeps until the rank arrives, the poll interval ends or a signal comes; returns whether the rank has arrived. */
static int arrives_while_asleep(const struct barrier *barrier, struct slot *slot, uint32_t number) {
    struct timespec pause = {(time_t)(barrier->poll_nanoseconds / 1000000000u),
                             (long)(barrier->poll_nanoseconds % 1000000000u)};
    uint32_t seen = count_of(slot);
    if (has_arrived(seen, number))
        return 1;
    __atomic_store_n(&slot->sleepers[number & 1], 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &slot->count, FUTEX_WAIT, seen, &pause, NULL, 0);
    return has_arrived(count_of(slot), number);
}

/* Returns 0 when all ranks have reached the barrier, else 1 + the number of a late rank; may be called again. */
int cpulaunch_ccl_await(const struct barrier *barrier, uint32_t number) {
    uint64_t until = 0;
    for (uint32_t other = 0; other < barrier->size; other++) {
        struct slot *slot = barrier->ranks[other].slot;
        if (other != barrier->rank && !arrives_soon(barrier, slot, number, &until) &&
            !arrives_while_asleep(barrier, slot, number))
            return (int)other + 1;
    }
    return 0;
}

/* Announces that this rank has reached the barrier; then as cpulaunch_ccl_await. */
int cpulaunch_ccl_wait(const struct barrier *barrier, uint32_t number) {
    struct slot *mine = barrier->ranks[barrier->rank].slot;
    __atomic_store_n(&mine->count, number, __ATOMIC_SEQ_CST); /* before the sleeper flag is read */
    if (__atomic_load_n(&mine->sleepers[number & 1], __ATOMIC_SEQ_CST)) {
        mine->sleepers[number & 1] = 0;
        syscall(SYS_futex, &mine->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
    return cpulaunch_ccl_await(barrier, number);
}

/* Returns 0 if all ranks have announced the same call, else -1 - the number of a rank with another call. */
int cpulaunch_ccl_compare(const struct barrier *barrier, uint32_t number) {
    const struct call *mine = &barrier->ranks[barrier->rank].slot->announcements[number & 1].call;
    for (uint32_t other = 0; other < barrier->size; other++)
        if (memcmp(&barrier->ranks[other].slot->announcements[number & 1].call, mine, sizeof *mine) != 0)
            return -1 - (int)other;
    return 0;
}

/* Publishes the call and two values; then as cpulaunch_ccl_wait, and if that is 0, as cpulaunch_ccl_compare. */
int cpulaunch_ccl_meet(const struct barrier *barrier, uint32_t number, const void *call, uint64_t first,
                       uint64_t second) {
    struct slot *mine = barrier->ranks[barrier->rank].slot;
    memcpy(&mine->announcements[number & 1].call, call, sizeof(struct call));
    mine->announcements[number & 1].values[0] = first;
    mine->announcements[number & 1].values[1] = second;
    int late = cpulaunch_ccl_wait(barrier, number);
    return late ? late : cpulaunch_ccl_compare(barrier, number);
}

/*
 * Small tensors: every rank copies its own to its payload, and after the barrier reduces those of all ranks
 */

/* Reduces the payloads of all ranks, in rank order, into `count` elements at the address. */
void cpulaunch_ccl_reduce_brought(const struct barrier *barrier, uint32_t number, void *address, uint64_t count,
                                  const struct reduction *how) {
    const struct arithmetic *type = &types[how->type];
    const void *left = barrier->ranks[0].payloads[number & 1];
    for (uint32_t other = 1; other < barrier->size; other++) {
        type->combine[how->operation](address, left, barrier->ranks[other].payloads[number & 1], count);
        left = address;
    }
    if (left != address)
        memcpy(address, left, count * type->size);
    if (how->divisor > 1)
        type->divide(address, count, how->divisor);
}

/* Copies the elements to the payload; as cpulaunch_ccl_meet; if that is 0, as cpulaunch_ccl_reduce_brought. */
int cpulaunch_ccl_all_reduce_small(const struct barrier *barrier, uint32_t number, const void *call, void *address,
                                   uint64_t count, const struct reduction *how) {
    memcpy(barrier->ranks[barrier->rank].payloads[number & 1], address, count * types[how->type].size);
    int state = cpulaunch_ccl_meet(barrier, number, call, 0, 0);
    if (state == 0)
        cpulaunch_ccl_reduce_brought(barrier, number, address, count, how);
    return state;
}

/*
 * Large tensors: each rank reduces its share of the elements, and writes the result into the other ranks' memory
 */

typedef ssize_t transfer(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long,
                         unsigned long);

/* Returns 0 when all bytes are copied, else an errno. */
static int copy_all(transfer *copy, pid_t process, uint8_t *mine, uint64_t theirs, uint64_t size) {
    while (size > 0) {
        struct iovec here = {mine, size}, there = {(void *)theirs, size};
        ssize_t done = copy(process, &here, 1, &there, 1, 0);
        if (done <= 0)
            return done < 0 && errno != 0 ? errno : EFAULT;
        mine += done, theirs += (uint64_t)done, size -= (uint64_t)done;
    }
    return 0;
}

#define ALL_OTHERS (-2) /* a value of `recipient`; -1 is no rank */

struct share { /* `bytes` bytes from the offset on, in a tensor that all ranks have */
    const uint8_t *own;  /* this rank's elements */
    uint8_t *target;     /* receives the result; null if only the recipient does */
    uint64_t offset, bytes;
    int32_t recipient;   /* the rank that also receives the result; -1: none; ALL_OTHERS */
    int32_t failed_rank; /* set if the memory of this rank could not be accessed */
};

/* Reduces one chunk over all ranks, starting with the next rank; returns 0 or an errno. */
static int reduce_chunk(const struct barrier *barrier, uint32_t number, struct share *share,
                        const struct reduction *how, uint8_t *result, uint64_t done, uint64_t size) {
    const struct arithmetic *type = &types[how->type];
    const uint8_t *left = share->own + done;
    for (uint32_t step = 1; step < barrier->size; step++) {
        uint32_t other = (barrier->rank + step) % barrier->size;
        const struct slot *slot = barrier->ranks[other].slot;
        uint64_t start = slot->announcements[number & 1].values[0] + share->offset + done;
        int error = copy_all(process_vm_readv, slot->process, barrier->scratch, start, size);
        if (error) {
            share->failed_rank = (int32_t)other;
            return error;
        }
        type->combine[how->operation](result, left, barrier->scratch, size / type->size);
        left = result;
    }
    if (left != result)
        memcpy(result, left, size);
    if (how->divisor > 1)
        type->divide(result, size / type->size, how->divisor);
    return 0;
}

/* Writes the result into the memory of the recipient, or of all other ranks; returns 0 or an errno. */
static int send_chunk(const struct barrier *barrier, uint32_t number, struct share *share, uint8_t *result,
                      uint64_t done, uint64_t size) {
    for (uint32_t step = 1; step < barrier->size; step++) {
        uint32_t other = (barrier->rank + step) % barrier->size;
        const struct slot *slot = barrier->ranks[other].slot;
        if (share->recipient != ALL_OTHERS && share->recipient != (int32_t)other)
            continue;
        uint64_t start = slot->announcements[number & 1].values[0] + share->offset + done;
        int error = copy_all(process_vm_writev, slot->process, result, start, size);
        if (error) {
            share->failed_rank = (int32_t)other;
            return error;
        }
    }
    return 0;
}

/*
 * Reduces this rank's share, chunk by chunk. The first value that each rank has published at the barrier is the
 * address of its tensor. Returns 0, or an errno and sets failed_rank.
 */
int cpulaunch_ccl_reduce_share(const struct barrier *barrier, uint32_t number, struct share *share,
                               const struct reduction *how) {
    for (uint64_t done = 0; done < share->bytes; done += barrier->chunk_bytes) {
        uint64_t left = share->bytes - done, size = left < barrier->chunk_bytes ? left : barrier->chunk_bytes;
        uint8_t *result = share->target != NULL ? share->target + done : barrier->scratch + barrier->chunk_bytes;
        int error = reduce_chunk(barrier, number, share, how, result, done, size);
        if (error == 0)
            error = send_chunk(barrier, number, share, result, done, size);
        if (error)
            return error;
    }
    return 0;
}
