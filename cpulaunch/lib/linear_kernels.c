/*
 * Products of a few rows of activations with the weights of a linear layer, which stay packed in memory in one of four
 * types: fp32, bf16, int8 with a scale for each row, int4 with a scale for each group of 32 columns. With few rows the
 * time is that of reading the weights once, so all types are converted to fp32 in registers and accumulated in fp32,
 * except int8 and int4 on CPUs with AVX512_VNNI (see linear_digits.h).
 *
 * cpulaunch/worker/weights/library.py calls these functions. linear_rows.h has the kernels; it is included once for
 * each instruction set. Threads are those of the process's own OpenMP runtime: its functions are declared here and left
 * undefined, so that the dynamic linker takes torch's (libgomp, or libiomp5, which has the same functions) and never
 * loads another runtime. Without one in the process the library cannot be loaded.
 * Source: libgomp ABI, "Implementing PARALLEL construct".
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 2 /* of the interface between library.py and this file: increment it with every change */

#define GROUP 32              /* columns that share a scale of int4 weights */
#define BLOCK 4               /* weight rows that are read at the same time */
#define SCALES 16             /* scales of a row of int4 weights that are converted at a time */
#define STACK_FLOATS 4096     /* activations that are converted on the stack */
#define STACK_BYTES (16 << 10) /* digits of activations that are kept on the stack */
#define LINE 64               /* bytes of a cache line */
#define AHEAD 1024            /* bytes between what is multiplied and what is fetched */
#define ALONE_BYTES (32 << 10) /* weights of this size or smaller are read by one thread: waking the others takes longer */

enum kind { FP32, BF16, INT8, INT4 };
enum instructions { NO_VECTORS, AVX2, AVX512, AVX512_VNNI };

struct weights { /* a packed weight of `rows` x `columns`, filled by library.py */
    const void *data, *scales;
    const float *bias; /* NULL without one */
    int64_t rows, columns;
    int32_t kind;
    int32_t instructions;
};

struct job { /* a product, or a conversion of all weights to bf16 */
    const struct weights *weights;
    const float *input;
    void *output;
    int64_t count; /* rows of the input; 0 converts the weights */
    int32_t is_bf16; /* type of the output */
    const struct digits *digits; /* of each row of the input; NULL: it is multiplied in fp32 */
};

/* of the OpenMP runtime in this process */
void GOMP_parallel(void (*function)(void *), void *argument, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);

/* Rows row, row + apart, … of the weights, and `count` rows of the input, that are multiplied at the same time.
 *
 * They lie far apart because the CPU's own prefetchers follow one stream in each page of memory: they are slow for
 * several short rows within one page. */
struct block {
    int rows, count;
    int64_t row, apart;
};

/* Bytes of a weight in a type without groups. */
static inline int size_of(int kind) {
    return kind == FP32 ? 4 : kind == BF16 ? 2 : 1;
}

/* The prefetchers of the CPU stop at the end of each page; this goes on. */
#define FETCH(address) _mm_prefetch((const char *)(address) + AHEAD, _MM_HINT_T0)

static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static inline float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* Effect: stores a sum of row `row` of the weights and row `index` of the input. */
static inline void store_result(int kind, const struct job *job, int64_t row, int64_t index, float result) {
    const struct weights *weights = job->weights;
    if (kind == INT8)
        result *= ((const float *)weights->scales)[row];
    if (weights->bias)
        result += weights->bias[row];
    if (job->is_bf16)
        ((uint16_t *)job->output)[index * weights->rows + row] = to_bf16(result);
    else
        ((float *)job->output)[index * weights->rows + row] = result;
}

#define NAME(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define TILE 2 /* rows of the input at the same time: as many as there are registers for */
#include "linear_rows.h"
#undef NAME
#undef TARGET
#undef LANES
#undef TILE

#define NAME(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define LANES 16
#define TILE 4
#include "linear_rows.h"
#include "linear_digits.h"

int cpulaunch_linear_version(void) {
    return VERSION;
}

/* The best instruction set of this CPU, as in `enum instructions`. */
int cpulaunch_linear_instructions(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return __builtin_cpu_supports("avx512vnni") ? AVX512_VNNI : AVX512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? AVX2 : NO_VECTORS;
}

/* This thread's part: whole blocks of weight rows, so that no result depends on the number of threads. */
static void run_part(const struct job *job, int64_t thread, int64_t threads) {
    int64_t rows = job->weights->rows, blocks = (rows + BLOCK - 1) / BLOCK;
    int64_t first = blocks * thread / threads * BLOCK, end = blocks * (thread + 1) / threads * BLOCK;
    end = end < rows ? end : rows;
    if (job->digits)
        multiply_digits(job, first, end);
    else if (job->weights->instructions >= AVX512)
        (job->count ? multiply_avx512 : dequantize_avx512)(job, first, end);
    else
        (job->count ? multiply_avx2 : dequantize_avx2)(job, first, end);
}

static void run_own_part(void *job) {
    run_part(job, omp_get_thread_num(), omp_get_num_threads());
}

static void run(const struct job *job, int threads) {
    static const int bits[] = {[FP32] = 32, [BF16] = 16, [INT8] = 8, [INT4] = 4};
    const struct weights *weights = job->weights;
    if (threads <= 1 || weights->rows * weights->columns * bits[weights->kind] / 8 <= ALONE_BYTES)
        run_part(job, 0, 1);
    else
        GOMP_parallel(run_own_part, (void *)job, (unsigned)threads, 0);
}

/* Effect: runs a product, with digits if the CPU is faster with them and there is memory for them. */
static void multiply(struct job *job, int threads) {
    _Alignas(LINE) char on_stack[STACK_BYTES];
    void *digits = NULL;
    if (can_use_digits(job->weights)) {
        int64_t stride = size_of_digits(job->weights), size = job->count * stride;
        digits = size <= STACK_BYTES ? on_stack : aligned_alloc(LINE, size);
        job->digits = digits;
        for (int64_t row = 0; digits && row < job->count; row++)
            write_digits(job->weights, job->input + row * job->weights->columns, (void *)digits_of(job, row));
    }
    run(job, threads);
    if (digits != on_stack)
        free(digits);
}

/* output[count, rows] = input[count, columns] * weights^T + bias, in fp32. Returns 0. */
int cpulaunch_linear_fp32(const struct weights *weights, const float *input, float *output, int64_t count, int threads) {
    struct job job = {weights, input, output, count, 0, NULL};
    if (count > 0)
        multiply(&job, threads);
    return 0;
}

/* The same for activations in bf16; the sums are rounded to bf16 once. Returns 0, or -1 without memory. */
int cpulaunch_linear_bf16(
    const struct weights *weights, const uint16_t *input, uint16_t *output, int64_t count, int threads) {
    float on_stack[STACK_FLOATS], *converted = on_stack;
    int64_t size = count * weights->columns;
    if (count <= 0)
        return 0;
    if (size > STACK_FLOATS && !(converted = malloc(size * sizeof *converted)))
        return -1;
    for (int64_t i = 0; i < size; i++)
        converted[i] = from_bf16(input[i]);
    struct job job = {weights, converted, output, count, 1, NULL};
    multiply(&job, threads);
    if (converted != on_stack)
        free(converted);
    return 0;
}

/* output[rows, columns] = the values of int8 or int4 weights, rounded to bf16. Returns 0. */
int cpulaunch_linear_dequantize(const struct weights *weights, uint16_t *output, int threads) {
    struct job job = {weights, NULL, output, 0, 1, NULL};
    run(&job, threads);
    return 0;
}

/*
 * output[count, columns] = input / sqrt(mean(input^2) + epsilon) * (weight + offset), row by row, in fp32. Returns 0.
 * Sixteen partial sums let the compiler use vectors, and make the result independent of their width.
 */
int cpulaunch_linear_rms_norm(
    const float *input, const float *weight, float *output, int64_t count, int64_t columns, float epsilon,
    float offset) {
    for (int64_t row = 0; row < count; row++, input += columns, output += columns) {
        float sums[16] = {0}, total = 0;
        int64_t column = 0;
        for (; column + 16 <= columns; column += 16)
            for (int lane = 0; lane < 16; lane++)
                sums[lane] += input[column + lane] * input[column + lane];
        for (; column < columns; column++)
            sums[column % 16] += input[column] * input[column];
        for (int lane = 0; lane < 16; lane++)
            total += sums[lane];
        float factor = 1 / sqrtf(total / (float)columns + epsilon);
        for (column = 0; column < columns; column++)
            output[column] = input[column] * factor * (weight[column] + offset);
    }
    return 0;
}
