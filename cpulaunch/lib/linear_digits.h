/*
 * Products of few rows of activations with int8 and int4 weights in whole numbers, for CPUs with AVX512_VNNI.
 *
 * A row of activations is written as `unit` times whole numbers of 24 bits, i.e. DIGITS signed digits in base 256, as
 * precise for the largest activation as fp32. One instruction multiplies 64 weights with 64 digits and sums the products
 * exactly. The kernels of linear_rows.h convert each weight to fp32 first, which takes longer than reading it. Rows that
 * are too uneven or not finite use those kernels.
 */
#define DIGITS 3
#define LARGEST 8323072.0f /* whole number of the largest activation: 127 * 256^2, so that no first digit is -128 */
#define SMALL 8192         /* whole numbers below it have lost more than 11 of fp32's 24 bits */
#define LEAST_MEAN 512.0f  /* of the small numbers of a row, but for zeros: 9 bits. Less could be all of a result */
#define SMALLEST 1e-30f    /* largest activation whose unit is a normal number */
#define MOST_COLUMNS (1 << 20) /* more could overflow the sums of int8 weights */
#define PIECE 128 /* columns of int4 weights that are multiplied at the same time, in a register of 64 bytes */

#define DIGITS_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))
#define DIGITS_INLINE DIGITS_TARGET static inline __attribute__((always_inline))

/* A row of activations, aligned to a cache line.
 *
 * int8: for every 64 columns, 64 first digits, 64 second, 64 third ones. int4: for every PIECE columns and each digit,
 * those of the low nibbles of four groups, then those of the high nibbles; then what is to be added to the products,
 * because the nibbles hold values plus 8. Zeros fill the last part. */
struct digits {
    float unit;                         /* 0: the row is multiplied in fp32 */
    int32_t offsets[DIGITS][LINE / 4]   /* int8: the sums begin with these, because the weights are used plus 128 */
        __attribute__((aligned(LINE)));
    int8_t values[];
};

#define PIECE_BYTES (DIGITS * PIECE + LINE) /* of a row of activations, for PIECE columns of int4 weights */

static int64_t size_of_digits(const struct weights *weights) {
    int64_t columns = weights->columns;
    int64_t values = weights->kind == INT8 ? (columns + LINE - 1) / LINE * LINE * DIGITS
                                           : (columns + PIECE - 1) / PIECE * PIECE_BYTES;
    return sizeof(struct digits) + values;
}

static inline const struct digits *digits_of(const struct job *job, int64_t row) {
    return (const void *)((const char *)job->digits + row * size_of_digits(job->weights));
}

static int can_use_digits(const struct weights *weights) {
    return weights->instructions == AVX512_VNNI && (weights->kind == INT8 || weights->kind == INT4) &&
           weights->columns <= MOST_COLUMNS;
}

/* The weighted sums of a piece, in units, one for every four bytes. `low`, `high`: the weights' nibbles, one a byte. */
DIGITS_INLINE __m512i whole(__m512i low, __m512i high, const int8_t *values) {
    __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 3
    for (int digit = 0; digit < DIGITS; digit++) {
        const int8_t *at = values + digit * PIECE;
        sum = _mm512_dpbusd_epi32(_mm512_slli_epi32(sum, 8), low, _mm512_load_si512(at));
        sum = _mm512_dpbusd_epi32(sum, high, _mm512_load_si512(at + LINE));
    }
    return sum;
}

/* Where the digits of 16 columns begin in `values`, and the distance from one digit to the next. */
static inline int64_t place_of(int kind, int64_t column, int64_t *apart) {
    *apart = kind == INT8 ? LINE : PIECE;
    if (kind == INT8)
        return column / LINE * LINE * DIGITS + column % LINE;
    int64_t group = column % PIECE / GROUP, is_high = column % GROUP / (GROUP / 2);
    return column / PIECE * PIECE_BYTES + is_high * LINE + group * (GROUP / 2);
}

/* Effect: writes the corrections for the values that were added to the weights. */
DIGITS_TARGET static void write_offsets(int kind, int64_t columns, struct digits *row) {
    if (kind == INT8) {
        __m512i sums[DIGITS] = {0};
        for (int64_t at = 0; at < columns * DIGITS; at += LINE * DIGITS)
            for (int digit = 0; digit < DIGITS; digit++)
                sums[digit] = _mm512_dpbusd_epi32(
                    sums[digit], _mm512_set1_epi8((char)128), _mm512_load_si512(row->values + at + digit * LINE));
        for (int digit = 0; digit < DIGITS; digit++)
            _mm512_store_si512(row->offsets[digit], _mm512_sub_epi32(_mm512_setzero_si512(), sums[digit]));
        return;
    }
    const __m512i eight = _mm512_set1_epi8(8);
    int8_t *at = row->values;
    for (int64_t column = 0; column < columns; column += PIECE, at += PIECE_BYTES)
        _mm512_store_si512(at + DIGITS * PIECE, _mm512_sub_epi32(_mm512_setzero_si512(), whole(eight, eight, at)));
}

/* Effect: writes a row of activations; with the unit 0 where it is to be multiplied in fp32. */
DIGITS_TARGET static void write_digits(const struct weights *weights, const float *input, struct digits *row) {
    int64_t columns = weights->columns, apart;
    __m512 largest = _mm512_setzero_ps(), total = _mm512_setzero_ps();
    for (int64_t column = 0; column < columns; column += 16) {
        __mmask16 mask = columns - column < 16 ? (1 << (columns - column)) - 1 : 0xFFFF;
        __m512 size = _mm512_abs_ps(_mm512_maskz_loadu_ps(mask, input + column));
        largest = _mm512_max_ps(largest, size);
        total = _mm512_add_ps(total, size); /* NaN and infinity reach it */
    }
    float most = _mm512_reduce_max_ps(largest), sum = _mm512_reduce_add_ps(total);
    row->unit = 0;
    if (!isfinite(sum) || most < SMALLEST)
        return;
    memset(row->values, 0, size_of_digits(weights) - sizeof *row);
    const __m512 factor = _mm512_set1_ps(LARGEST / most);
    const __m512i half = _mm512_set1_epi32(128);
    __m512i small_total = _mm512_setzero_si512();
    int64_t small_count = 0;
    for (int64_t column = 0; column < columns; column += 16) {
        __mmask16 mask = columns - column < 16 ? (1 << (columns - column)) - 1 : 0xFFFF;
        __m512 x = _mm512_maskz_loadu_ps(mask, input + column);
        __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(x, factor)), size = _mm512_abs_epi32(number);
        __mmask16 small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(SMALL)) &
                          _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ);
        small_total = _mm512_mask_add_epi32(small_total, small, small_total, size);
        small_count += __builtin_popcount(small);
        int8_t *at = row->values + place_of(weights->kind, column, &apart);
#pragma GCC unroll 3
        for (int digit = DIGITS - 1; digit >= 0; digit--) {
            _mm_storeu_si128((__m128i *)(at + digit * apart), _mm512_cvtepi32_epi8(number));
            number = _mm512_srai_epi32(_mm512_add_epi32(number, half), 8);
        }
    }
    if (_mm512_reduce_add_ps(_mm512_cvtepi32_ps(small_total)) < LEAST_MEAN * (float)small_count)
        return;
    write_offsets(weights->kind, columns, row);
    row->unit = most / LARGEST;
}

/* 64 columns of a block of int8 weights, or those in the mask. */
DIGITS_INLINE void add_int8(
    struct block block, const uint8_t *data, int64_t stride, __mmask64 mask, const int8_t *values,
    __m512i sums[BLOCK][DIGITS]) {
#pragma GCC unroll 4
    for (int r = 0; r < block.rows; r++) {
        __m512i bits = _mm512_maskz_loadu_epi8(mask, data + r * stride);
        __m512i added = _mm512_xor_si512(bits, _mm512_set1_epi8((char)128)); /* each weight plus 128 */
#pragma GCC unroll 3
        for (int digit = 0; digit < DIGITS; digit++)
            sums[r][digit] = _mm512_dpbusd_epi32(sums[r][digit], added, _mm512_load_si512(values + digit * LINE));
    }
}

/* The sums, in units, of a block of int8 weights without their scales, for one row: two would need more registers. */
DIGITS_INLINE void multiply_int8_digits(
    const struct weights *weights, struct block block, const struct digits *row, __m512 result[BLOCK]) {
    int64_t columns = weights->columns, stride = block.apart * columns, column = 0;
    const uint8_t *data = (const uint8_t *)weights->data + block.row * columns;
    const int8_t *values = row->values;
    __m512i sums[BLOCK][DIGITS];
#pragma GCC unroll 4
    for (int r = 0; r < block.rows; r++)
#pragma GCC unroll 3
        for (int digit = 0; digit < DIGITS; digit++)
            sums[r][digit] = _mm512_load_si512(row->offsets[digit]);
    for (; column + LINE <= columns; column += LINE, values += LINE * DIGITS) {
#pragma GCC unroll 4
        for (int r = 0; r < block.rows; r++)
            FETCH(data + r * stride + column);
        add_int8(block, data + column, stride, ~0ull, values, sums);
    }
    if (column < columns)
        add_int8(block, data + column, stride, (1ull << (columns - column)) - 1, values, sums);
#pragma GCC unroll 4
    for (int r = 0; r < block.rows; r++) {
        result[r] = _mm512_cvtepi32_ps(sums[r][0]);
#pragma GCC unroll 2
        for (int digit = 1; digit < DIGITS; digit++)
            result[r] = _mm512_fmadd_ps(result[r], _mm512_set1_ps(256), _mm512_cvtepi32_ps(sums[r][digit]));
    }
}

/* Four scales in bf16, each for the four lanes of a group. */
DIGITS_INLINE __m512 spread_scales(const uint16_t *scales, int count) {
    uint64_t bits = 0;
    const __m512i lanes = _mm512_set_epi32(
        0x30003, 0x30003, 0x30003, 0x30003, 0x20002, 0x20002, 0x20002, 0x20002, 0x10001, 0x10001, 0x10001, 0x10001, 0, 0,
        0, 0);
    memcpy(&bits, scales, count * sizeof *scales);
    __m512i wide = _mm512_castsi128_si512(_mm_cvtsi64_si128((long long)bits));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, lanes, wide));
}

/* PIECE columns of a block of int4 weights, or the first `groups` groups of them: result[m][r] += products. */
DIGITS_INLINE void add_int4(
    struct block block, const uint8_t *data, int64_t stride, const uint16_t *scales, int64_t scale_stride, int groups,
    const int8_t *const values[2], __m512 result[2][BLOCK]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    __mmask16 mask = (1 << 4 * groups) - 1;
#pragma GCC unroll 4
    for (int r = 0; r < block.rows; r++) {
        __m512i pairs = _mm512_maskz_loadu_epi32(mask, data + r * stride);
        __m512i low = _mm512_and_si512(pairs, nibble), high = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), nibble);
        __m512 factors = spread_scales(scales + r * scale_stride, groups);
#pragma GCC unroll 2
        for (int m = 0; m < block.count; m++) {
            __m512i sum = whole(low, high, values[m]);
            sum = _mm512_add_epi32(sum, _mm512_load_si512(values[m] + DIGITS * PIECE));
            result[m][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factors, result[m][r]);
        }
    }
}

/* The sums, in units, of a block of int4 weights: result[m][r]. */
DIGITS_INLINE void multiply_int4_digits(
    const struct weights *weights, struct block block, const struct digits *const rows[2], __m512 result[2][BLOCK]) {
    const int per_piece = PIECE / GROUP;
    int64_t groups = weights->columns / GROUP, stride = block.apart * weights->columns / 2, group = 0;
    const uint8_t *data = (const uint8_t *)weights->data + block.row * weights->columns / 2;
    const uint16_t *scales = (const uint16_t *)weights->scales + block.row * groups;
    const int8_t *values[2] = {rows[0]->values, rows[1]->values};
#pragma GCC unroll 2
    for (int m = 0; m < block.count; m++)
#pragma GCC unroll 4
        for (int r = 0; r < block.rows; r++)
            result[m][r] = _mm512_setzero_ps();
    for (; group + per_piece <= groups; group += per_piece) {
#pragma GCC unroll 4
        for (int r = 0; r < block.rows; r++) {
            FETCH(data + r * stride);
            FETCH(scales + r * block.apart * groups + group);
        }
        add_int4(block, data, stride, scales + group, block.apart * groups, per_piece, values, result);
        data += LINE, values[0] += PIECE_BYTES, values[1] += PIECE_BYTES;
    }
    if (group < groups)
        add_int4(block, data, stride, scales + group, block.apart * groups, (int)(groups - group), values, result);
}

/* Effect: stores the products of a block with one or two rows of activations, which begin with row `first`. */
DIGITS_INLINE void multiply_digits_block(int kind, const struct job *job, struct block block, int64_t first) {
    const struct digits *rows[2] = {digits_of(job, first), digits_of(job, first + block.count - 1)};
    __m512 result[2][BLOCK];
    if (kind == INT8)
        multiply_int8_digits(job->weights, block, rows[0], result[0]);
    else
        multiply_int4_digits(job->weights, block, rows, result);
#pragma GCC unroll 2
    for (int m = 0; m < block.count; m++)
#pragma GCC unroll 4
        for (int r = 0; r < block.rows; r++)
            store_result(kind, job, block.row + r * block.apart, first + m, sum_avx512(result[m][r]) * rows[m]->unit);
}

/* Effect: stores the products of weight rows row, row + apart, … with all rows of activations that have digits. */
DIGITS_INLINE void multiply_digits_rows(int kind, const struct job *job, int count, int64_t row, int64_t apart) {
    for (int64_t first = 0; first < job->count; first++) {
        if (digits_of(job, first)->unit == 0)
            continue;
        if (kind == INT4 && first + 1 < job->count && digits_of(job, first + 1)->unit != 0) {
            multiply_digits_block(kind, job, (struct block){count, 2, row, apart}, first);
            first++;
        } else
            multiply_digits_block(kind, job, (struct block){count, 1, row, apart}, first);
    }
}

/* Weight rows [row, end) of a kind; see MULTIPLY_KIND. */
#define MULTIPLY_DIGITS(name, kind) \
    DIGITS_TARGET static __attribute__((noinline)) void name(const struct job *job, int64_t row, int64_t end) { \
        int64_t apart = (end - row) / BLOCK; \
        for (int64_t i = 0; i < apart; i++) \
            multiply_digits_rows(kind, job, BLOCK, row + i, apart); \
        for (row += apart * BLOCK; row < end; row++) \
            multiply_digits_rows(kind, job, 1, row, 1); \
    }

MULTIPLY_DIGITS(multiply_int8_rows, INT8)
MULTIPLY_DIGITS(multiply_int4_rows, INT4)

static void multiply_digits(const struct job *job, int64_t row, int64_t end) {
    (job->weights->kind == INT8 ? multiply_int8_rows : multiply_int4_rows)(job, row, end);
    for (int64_t first = 0, next; first < job->count; first = next) {
        next = first + 1;
        if (digits_of(job, first)->unit != 0)
            continue;
        while (next < job->count && digits_of(job, next)->unit == 0)
            next++;
        struct job others = *job;
        others.input += first * job->weights->columns;
        others.output = (char *)job->output + first * job->weights->rows * (job->is_bf16 ? 2 : 4);
        others.count = next - first;
        multiply_avx512(&others, row, end);
    }
}
