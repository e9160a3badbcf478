/*
 * The kernels of linear_kernels.c for one instruction set: NAME(f) is the name of a function, TARGET its attribute,
 * LANES the floats in a register, TILE the rows of the input that are multiplied at the same time.
 */
#define INLINE TARGET static inline __attribute__((always_inline))

#if LANES == 16
#define VECTOR __m512
#define ZERO() _mm512_setzero_ps()
#define LOAD(address) _mm512_loadu_ps(address)
#define STORE(address, value) _mm512_storeu_ps(address, value)
#define SPREAD(value) _mm512_set1_ps(value)
#define MULTIPLY_ADD(a, b, c) _mm512_fmadd_ps(a, b, c)
#define MULTIPLY(a, b) _mm512_mul_ps(a, b)
#define WIDEN_BF16(address) \
    _mm512_castsi512_ps( \
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(address))), 16))
#define WIDEN_INT8(address) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(address))))
#else
#define VECTOR __m256
#define ZERO() _mm256_setzero_ps()
#define LOAD(address) _mm256_loadu_ps(address)
#define STORE(address, value) _mm256_storeu_ps(address, value)
#define SPREAD(value) _mm256_set1_ps(value)
#define MULTIPLY_ADD(a, b, c) _mm256_fmadd_ps(a, b, c)
#define MULTIPLY(a, b) _mm256_mul_ps(a, b)
#define WIDEN_BF16(address) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(address))), 16))
#define WIDEN_INT8(address) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(address))))
#endif

INLINE float NAME(sum)(VECTOR value) {
#if LANES == 16
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
#else
    __m256 half = value;
#endif
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

/* The weights of LANES columns, without the scale. */
INLINE VECTOR NAME(widen)(int kind, const uint8_t *address) {
    return kind == FP32 ? LOAD((const float *)address) : kind == BF16 ? WIDEN_BF16(address) : WIDEN_INT8(address);
}

/* The first `count` < LANES of them and zeros, without reading beyond them. */
INLINE VECTOR NAME(widen_part)(int kind, const uint8_t *address, int64_t count) {
    uint8_t copy[LANES * sizeof(float)] = {0};
    memcpy(copy, address, count * size_of(kind));
    return NAME(widen)(kind, copy);
}

/* The values of a group of int4 weights, whose low nibbles are columns 0 to 15 and whose high nibbles the others. */
INLINE void NAME(unpack)(const uint8_t *group, float scale, VECTOR values[GROUP / LANES]) {
#if LANES == 16
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    __m512 scaled = MULTIPLY(table, SPREAD(scale));
    __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)group));
    values[0] = _mm512_permutexvar_ps(pairs, scaled); /* uses the low four bits of each index */
    values[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), scaled);
#else
    const __m256i low = _mm256_set1_epi32(15), zero = _mm256_set1_epi32(8);
    for (int half = 0; half < 2; half++) {
        __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(group + 8 * half)));
        __m256i first = _mm256_sub_epi32(_mm256_and_si256(pairs, low), zero);
        __m256i second = _mm256_sub_epi32(_mm256_srli_epi32(pairs, 4), zero);
        values[half] = MULTIPLY(_mm256_cvtepi32_ps(first), SPREAD(scale));
        values[2 + half] = MULTIPLY(_mm256_cvtepi32_ps(second), SPREAD(scale));
    }
#endif
}

/* A register's columns of the block: sums[m][r] += products. `stride`: weights from one row of the block to the next. */
INLINE void NAME(multiply_columns)(
    int kind, struct block block, const uint8_t *data, int64_t stride, const float *input, int64_t columns,
    VECTOR sums[TILE][BLOCK]) {
#pragma GCC unroll 4
    for (int r = 0; r < block.rows; r++) {
        VECTOR weights = NAME(widen)(kind, data + r * stride * size_of(kind));
#pragma GCC unroll 4
        for (int m = 0; m < block.count; m++)
            sums[m][r] = MULTIPLY_ADD(weights, LOAD(input + m * columns), sums[m][r]);
    }
}

/* The last `left` < LANES columns of the block. */
INLINE void NAME(multiply_last)(
    int kind, struct block block, const uint8_t *data, int64_t stride, const float *input, int64_t columns,
    int64_t left, VECTOR sums[TILE][BLOCK]) {
    for (int r = 0; r < block.rows; r++) {
        VECTOR weights = NAME(widen_part)(kind, data + r * stride * size_of(kind), left);
        for (int m = 0; m < block.count; m++) {
            VECTOR x = NAME(widen_part)(FP32, (const uint8_t *)(input + m * columns), left);
            sums[m][r] = MULTIPLY_ADD(weights, x, sums[m][r]);
        }
    }
}

/* All columns of the block, for fp32, bf16 and int8. */
INLINE void NAME(multiply_rows)(
    int kind, const struct weights *weights, struct block block, const float *input, VECTOR sums[TILE][BLOCK]) {
    const int size = size_of(kind), step = LINE / size;
    int64_t columns = weights->columns, stride = block.apart * columns, column = 0;
    const uint8_t *data = (const uint8_t *)weights->data + block.row * columns * size;
    for (; column + step <= columns; column += step) {
#pragma GCC unroll 4
        for (int r = 0; r < block.rows; r++)
            FETCH(data + (r * stride + column) * size);
#pragma GCC unroll 8
        for (int64_t at = column; at < column + step; at += LANES)
            NAME(multiply_columns)(kind, block, data + at * size, stride, input + at, columns, sums);
    }
    for (; column + LANES <= columns; column += LANES)
        NAME(multiply_columns)(kind, block, data + column * size, stride, input + column, columns, sums);
    if (column < columns)
        NAME(multiply_last)(
            kind, block, data + column * size, stride, input + column, columns, columns - column, sums);
}

/* The first `count` of SCALES scales in fp32. */
INLINE void NAME(convert_scales)(const uint16_t *scales, int64_t count, float *converted) {
    FETCH(scales);
    for (int part = 0; part < SCALES; part += LANES) {
        const uint8_t *address = (const uint8_t *)(scales + part);
        if (part + LANES <= count)
            STORE(converted + part, WIDEN_BF16(address));
        else if (part < count)
            STORE(converted + part, NAME(widen_part)(BF16, address, count - part));
    }
}

/* A group of each row of the block, the groups `stride` bytes apart. */
INLINE void NAME(multiply_group)(
    struct block block, const uint8_t *data, int64_t stride, const float *scales, const float *input,
    int64_t columns, VECTOR sums[TILE][BLOCK]) {
#pragma GCC unroll 4
    for (int r = 0; r < block.rows; r++) {
        VECTOR values[GROUP / LANES];
        NAME(unpack)(data + r * stride, scales[r * SCALES], values);
#pragma GCC unroll 4
        for (int m = 0; m < block.count; m++)
#pragma GCC unroll 4
            for (int part = 0; part < GROUP / LANES; part++)
                sums[m][r] = MULTIPLY_ADD(values[part], LOAD(input + m * columns + part * LANES), sums[m][r]);
    }
}

/* All columns of the block, for int4. */
INLINE void NAME(multiply_groups)(
    const struct weights *weights, struct block block, const float *input, VECTOR sums[TILE][BLOCK]) {
    int64_t columns = weights->columns, groups = columns / GROUP, stride = block.apart * columns / 2;
    const uint8_t *data = (const uint8_t *)weights->data + block.row * columns / 2;
    const uint16_t *scales = (const uint16_t *)weights->scales + block.row * groups;
    for (int64_t first = 0; first < groups; first += SCALES) {
        float converted[BLOCK * SCALES];
        int64_t end = groups - first < SCALES ? groups : first + SCALES;
#pragma GCC unroll 4
        for (int r = 0; r < block.rows; r++)
            NAME(convert_scales)(scales + r * block.apart * groups + first, end - first, converted + r * SCALES);
        for (int64_t group = first; group < end; group++) {
            const uint8_t *at = data + group * (GROUP / 2);
#pragma GCC unroll 4
            for (int r = 0; r < block.rows; r++)
                FETCH(at + r * stride);
            NAME(multiply_group)(block, at, stride, converted + group - first, input + group * GROUP, columns, sums);
        }
    }
}

/* Effect: stores the sums of a block. */
INLINE void NAME(store)(
    int kind, const struct job *job, struct block block, int64_t first, VECTOR sums[TILE][BLOCK]) {
#pragma GCC unroll 4
    for (int m = 0; m < block.count; m++)
#pragma GCC unroll 4
        for (int r = 0; r < block.rows; r++)
            store_result(kind, job, block.row + r * block.apart, first + m, NAME(sum)(sums[m][r]));
}

/* Effect: stores the products of a block with its `count` rows of the input, which begin with row `first`. */
INLINE void NAME(multiply_tile)(int kind, const struct job *job, struct block block, int64_t first) {
    const float *input = job->input + first * job->weights->columns;
    VECTOR sums[TILE][BLOCK];
#pragma GCC unroll 4
    for (int m = 0; m < block.count; m++)
#pragma GCC unroll 4
        for (int r = 0; r < block.rows; r++)
            sums[m][r] = ZERO();
    if (kind == INT4)
        NAME(multiply_groups)(job->weights, block, input, sums);
    else
        NAME(multiply_rows)(kind, job->weights, block, input, sums);
    NAME(store)(kind, job, block, first, sums);
}

/* Effect: stores the products of weight rows row, row + apart, … with all rows of the input. */
INLINE void NAME(multiply_block)(int kind, const struct job *job, int rows, int64_t row, int64_t apart) {
    int64_t first = 0;
    for (; first + TILE <= job->count; first += TILE)
        NAME(multiply_tile)(kind, job, (struct block){rows, TILE, row, apart}, first);
    switch (job->count - first) {
#if TILE == 4
    case 3:
        NAME(multiply_tile)(kind, job, (struct block){rows, 3, row, apart}, first);
        break;
    case 2:
        NAME(multiply_tile)(kind, job, (struct block){rows, 2, row, apart}, first);
        break;
#endif
    case 1:
        NAME(multiply_tile)(kind, job, (struct block){rows, 1, row, apart}, first);
    }
}

/* Weight rows [row, end) of a kind. The rows of a block are a quarter of them apart: see `struct block`. */
#define MULTIPLY_KIND(name, kind) \
    TARGET static __attribute__((noinline)) void NAME(name)(const struct job *job, int64_t row, int64_t end) { \
        int64_t apart = (end - row) / BLOCK; \
        for (int64_t i = 0; i < apart; i++) \
            NAME(multiply_block)(kind, job, BLOCK, row + i, apart); \
        for (row += apart * BLOCK; row < end; row++) \
            NAME(multiply_block)(kind, job, 1, row, 1); \
    }

MULTIPLY_KIND(multiply_fp32, FP32)
MULTIPLY_KIND(multiply_bf16, BF16)
MULTIPLY_KIND(multiply_int8, INT8)
MULTIPLY_KIND(multiply_int4, INT4)

static void NAME(multiply)(const struct job *job, int64_t row, int64_t end) {
    switch (job->weights->kind) {
    case FP32:
        NAME(multiply_fp32)(job, row, end);
        break;
    case BF16:
        NAME(multiply_bf16)(job, row, end);
        break;
    case INT8:
        NAME(multiply_int8)(job, row, end);
        break;
    case INT4:
        NAME(multiply_int4)(job, row, end);
    }
}

/* Effect: stores LANES finite values as bf16, rounded to the nearest even. */
INLINE void NAME(store_bf16)(uint16_t *address, VECTOR value) {
#if LANES == 16
    __m512i bits = _mm512_castps_si512(value), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    _mm256_storeu_si256((__m256i *)address, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#else
    __m256i bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    __m256i high = _mm256_srli_epi32(rounded, 16);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    _mm_storeu_si128((__m128i *)address, packed);
#endif
}

TARGET static void NAME(dequantize_int8)(const int8_t *data, float scale, int64_t columns, uint16_t *output) {
    int64_t column = 0;
    for (; column + LANES <= columns; column += LANES)
        NAME(store_bf16)(output + column, MULTIPLY(WIDEN_INT8(data + column), SPREAD(scale)));
    for (; column < columns; column++)
        output[column] = to_bf16(data[column] * scale);
}

TARGET static void NAME(dequantize_int4)(
    const uint8_t *data, const uint16_t *scales, int64_t columns, uint16_t *output) {
    for (int64_t group = 0; group < columns / GROUP; group++) {
        VECTOR values[GROUP / LANES];
        NAME(unpack)(data + group * (GROUP / 2), from_bf16(scales[group]), values);
        for (int part = 0; part < GROUP / LANES; part++)
            NAME(store_bf16)(output + group * GROUP + part * LANES, values[part]);
    }
}

static void NAME(dequantize)(const struct job *job, int64_t row, int64_t end) {
    const struct weights *weights = job->weights;
    int64_t columns = weights->columns;
    uint16_t *output = job->output;
    for (; row < end; row++) {
        if (weights->kind == INT8)
            NAME(dequantize_int8)(
                (const int8_t *)weights->data + row * columns, ((const float *)weights->scales)[row], columns,
                output + row * columns);
        else
            NAME(dequantize_int4)(
                (const uint8_t *)weights->data + row * (columns / 2),
                (const uint16_t *)weights->scales + row * (columns / GROUP), columns, output + row * columns);
    }
}

#undef INLINE
#undef VECTOR
#undef ZERO
#undef LOAD
#undef STORE
#undef SPREAD
#undef MULTIPLY_ADD
#undef MULTIPLY
#undef WIDEN_BF16
#undef WIDEN_INT8
#undef MULTIPLY_KIND
