/*
 * What the backend "ccl" does in one host's memory, without Python: ranks meet, reduce what they brought along to the
 * meeting, and reduce their share of a large tensor in one another's memory.
 *
 * cpulaunch/worker/ccl/memory/native.py calls it. shared_barrier.py and path.py beside it do the same, slower, where there is no
 * compiled library: a group may have ranks of both kinds. Their memory is laid out as in shared_barrier.py. Stores are seen in
 * the order in which they are made on x86-64, for which alone this is built. Sources: futex(2), process_vm_readv(2).
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

#define VERSION 1 /* of what native.py and this file agree on: it counts up with every change of that */

struct call { /* what ranks compare */
    uint64_t words[2];
};

struct place { /* a rank's slot, as in shared_barrier.py */
    uint32_t count, unused;
    int32_t process;
    uint32_t has_left;
    uint32_t sleepers[2];
    uint32_t unused_too[2];
    struct {
        struct call call;
        uint64_t words[2];
    } calls[2];
};
_Static_assert(offsetof(struct place, calls) == 32 && sizeof(struct place) == 96, "as in shared_barrier.py");

struct rank { /* where a rank's slot and its two payloads are */
    struct place *place;
    uint8_t *payloads[2];
};

struct seat { /* one rank's, filled by native.py */
    const struct rank *ranks;
    uint32_t rank, size;
    uint64_t spin_nanoseconds, glance_nanoseconds;
    uint8_t *scratch; /* two chunks */
    uint64_t chunk_bytes;
};

struct reduction { /* the numbers of oneCCL's C API, as in api.py; a result is divided by the divisor */
    int32_t type, operation;
    uint32_t divisor;
};

int cpulaunch_ccl_version(void) {
    return VERSION;
}

/*
 * Arithmetic. Each function is compiled for several instruction sets; the dynamic linker takes what the CPU has.
 */

#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))

static inline float widened(uint16_t narrow) {
    uint32_t bits = (uint32_t)narrow << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t narrowed(float value) { /* to the nearest, ties to even, as torch does */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

#define SAME(value) (value)
#define SUM(a, b) ((a) + (b))
#define PROD(a, b) ((a) * (b))
/* A NaN wins, as in torch.maximum and torch.minimum; which of 0.0 and -0.0, is as little said as there. */
#define MAX(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define MIN(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

typedef void combine(void *result, const void *left, const void *right, uint64_t count); /* result may be left */
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
 * Meeting
 */

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static uint32_t count_of(const struct place *place) {
    return __atomic_load_n(&place->count, __ATOMIC_ACQUIRE);
}

/* Counts go round after 2**32. */
static int is_there(uint32_t count, uint32_t number) {
    return (int32_t)(count - number) >= 0;
}

/* `until` is when this rank has looked long enough for all others; 0 before it had to for the first. */
static int comes_soon(const struct seat *seat, const struct place *place, uint32_t number, uint64_t *until) {
    if (is_there(count_of(place), number))
        return 1;
    if (seat->spin_nanoseconds == 0)
        return 0;
    if (*until == 0)
        *until = now() + seat->spin_nanoseconds;
    do {
        for (int look = 0; look < 16; look++) {
            _mm_pause();
            if (is_there(count_of(place), number))
                return 1;
        }
    } while (now() < *until);
    return 0;
}

/* Whether the rank has come when this one wakes up: for that, to look whether it still lives, or for a signal. */
static int comes_while_asleep(const struct seat *seat, struct place *place, uint32_t number) {
    struct timespec pause = {(time_t)(seat->glance_nanoseconds / 1000000000u),
                             (long)(seat->glance_nanoseconds % 1000000000u)};
    uint32_t seen = count_of(place);
    if (is_there(seen, number))
        return 1;
    __atomic_store_n(&place->sleepers[number & 1], 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &place->count, FUTEX_WAIT, seen, &pause, NULL, 0);
    return is_there(count_of(place), number);
}

/* 0 when all ranks have come to the meeting, else 1 + one that has not come yet: call again if it still may. */
int cpulaunch_ccl_await(const struct seat *seat, uint32_t number) {
    uint64_t until = 0;
    for (uint32_t other = 0; other < seat->size; other++) {
        struct place *place = seat->ranks[other].place;
        if (other != seat->rank && !comes_soon(seat, place, number, &until) && !comes_while_asleep(seat, place, number))
            return (int)other + 1;
    }
    return 0;
}

/* As cpulaunch_ccl_await, after saying that this rank is there. */
int cpulaunch_ccl_wait(const struct seat *seat, uint32_t number) {
    struct place *mine = seat->ranks[seat->rank].place;
    __atomic_store_n(&mine->count, number, __ATOMIC_SEQ_CST); /* before the look at who sleeps */
    if (__atomic_load_n(&mine->sleepers[number & 1], __ATOMIC_SEQ_CST)) {
        mine->sleepers[number & 1] = 0;
        syscall(SYS_futex, &mine->count, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
    return cpulaunch_ccl_await(seat, number);
}

/* 0 if all ranks that are here make the same call, else -1 - one that does not. */
int cpulaunch_ccl_compare(const struct seat *seat, uint32_t number) {
    const struct call *mine = &seat->ranks[seat->rank].place->calls[number & 1].call;
    for (uint32_t other = 0; other < seat->size; other++)
        if (memcmp(&seat->ranks[other].place->calls[number & 1].call, mine, sizeof *mine) != 0)
            return -1 - (int)other;
    return 0;
}

/* As cpulaunch_ccl_wait, then as cpulaunch_ccl_compare; the others see the words. */
int cpulaunch_ccl_meet(const struct seat *seat, uint32_t number, const void *call, uint64_t first, uint64_t second) {
    struct place *mine = seat->ranks[seat->rank].place;
    memcpy(&mine->calls[number & 1].call, call, sizeof(struct call));
    mine->calls[number & 1].words[0] = first;
    mine->calls[number & 1].words[1] = second;
    int late = cpulaunch_ccl_wait(seat, number);
    return late ? late : cpulaunch_ccl_compare(seat, number);
}

/*
 * Small tensors: every rank brings its own to the meeting, and reduces all of them
 */

/* Effect: the elements at the address are the reduction, in the order of the ranks, of what all have brought. */
void cpulaunch_ccl_reduce_brought(const struct seat *seat, uint32_t number, void *address, uint64_t count,
                                  const struct reduction *how) {
    const struct arithmetic *type = &types[how->type];
    const void *left = seat->ranks[0].payloads[number & 1];
    for (uint32_t other = 1; other < seat->size; other++) {
        type->combine[how->operation](address, left, seat->ranks[other].payloads[number & 1], count);
        left = address;
    }
    if (left != address)
        memcpy(address, left, count * type->size);
    if (how->divisor > 1)
        type->divide(address, count, how->divisor);
}

/* As cpulaunch_ccl_meet; if that is 0, as cpulaunch_ccl_reduce_brought. */
int cpulaunch_ccl_all_reduce_small(const struct seat *seat, uint32_t number, const void *call, void *address,
                                   uint64_t count, const struct reduction *how) {
    memcpy(seat->ranks[seat->rank].payloads[number & 1], address, count * types[how->type].size);
    int state = cpulaunch_ccl_meet(seat, number, call, 0, 0);
    if (state == 0)
        cpulaunch_ccl_reduce_brought(seat, number, address, count, how);
    return state;
}

/*
 * Large tensors: each rank reduces its share, and writes it into the others' memory
 */

typedef ssize_t transfer(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long,
                         unsigned long);

static int all_bytes(transfer *copy, pid_t process, uint8_t *mine, uint64_t theirs, uint64_t size) {
    while (size > 0) {
        struct iovec here = {mine, size}, there = {(void *)theirs, size};
        ssize_t done = copy(process, &here, 1, &there, 1, 0);
        if (done <= 0)
            return done < 0 && errno != 0 ? errno : EFAULT;
        mine += done, theirs += (uint64_t)done, size -= (uint64_t)done;
    }
    return 0;
}

#define ALL (-2)

struct share { /* of a tensor that all ranks have: bytes from the offset on */
    const uint8_t *own; /* this rank's */
    uint8_t *target;    /* where the result goes; null: nowhere but to whom it is sent */
    uint64_t offset, bytes;
    int32_t sent_to; /* a rank, -1 for nobody, or ALL */
    int32_t culprit; /* whose memory could not be reached */
};

/* Effect: the result is the reduction of all ranks' elements. The others are taken from the next one on, by turns. */
static int reduce_chunk(const struct seat *seat, uint32_t number, struct share *share, const struct reduction *how,
                        uint8_t *result, uint64_t done, uint64_t size) {
    const struct arithmetic *type = &types[how->type];
    const uint8_t *left = share->own + done;
    for (uint32_t step = 1; step < seat->size; step++) {
        uint32_t other = (seat->rank + step) % seat->size;
        const struct place *place = seat->ranks[other].place;
        uint64_t start = place->calls[number & 1].words[0] + share->offset + done;
        int error = all_bytes(process_vm_readv, place->process, seat->scratch, start, size);
        if (error) {
            share->culprit = (int32_t)other;
            return error;
        }
        type->combine[how->operation](result, left, seat->scratch, size / type->size);
        left = result;
    }
    if (left != result)
        memcpy(result, left, size);
    if (how->divisor > 1)
        type->divide(result, size / type->size, how->divisor);
    return 0;
}

static int send_chunk(const struct seat *seat, uint32_t number, struct share *share, uint8_t *result, uint64_t done,
                      uint64_t size) {
    for (uint32_t step = 1; step < seat->size; step++) {
        uint32_t other = (seat->rank + step) % seat->size;
        const struct place *place = seat->ranks[other].place;
        if (share->sent_to != ALL && share->sent_to != (int32_t)other)
            continue;
        uint64_t start = place->calls[number & 1].words[0] + share->offset + done;
        int error = all_bytes(process_vm_writev, place->process, result, start, size);
        if (error) {
            share->culprit = (int32_t)other;
            return error;
        }
    }
    return 0;
}

/* 0, or the errno of what went wrong with the culprit's memory. The first word at the meeting was where a tensor is. */
int cpulaunch_ccl_reduce_share(const struct seat *seat, uint32_t number, struct share *share,
                               const struct reduction *how) {
    for (uint64_t done = 0; done < share->bytes; done += seat->chunk_bytes) {
        uint64_t left = share->bytes - done, size = left < seat->chunk_bytes ? left : seat->chunk_bytes;
        uint8_t *result = share->target != NULL ? share->target + done : seat->scratch + seat->chunk_bytes;
        int error = reduce_chunk(seat, number, share, how, result, done, size);
        if (error == 0)
            error = send_chunk(seat, number, share, result, done, size);
        if (error)
            return error;
    }
    return 0;
}
