// Updates of optimizers on a CPU, and what goes with them. Plain pointers: neither Python's nor torch's headers.

#include "native.h"

#include <pthread.h>
#include <string.h>

#define BLOCK 65536       // elements that a thread takes at a time
#define BYTES (1 << 20)   // the same of bytes

// Memory is asked for what lies 256 elements of `wide` bytes further on: processors do not foresee seven streams.
// Numbers, as there may be nothing. Asking for that is no fault.
#define ASK(from, offset, wide) __builtin_prefetch((const void *)((uintptr_t)(from) + (offset) + 256 * (wide)))

typedef void update_function(const struct row *, const struct piece *, int64_t, int64_t, int);
typedef void sum_function(const struct sum *, int64_t);
typedef double squares_function(const void *, int64_t, int);

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

// Shuffles, by what each 16 or 8 bits of the result are of. The first two: of 16 bits, the upper half of each number.
#define SPREAD_WORDS \
    ((__m512i)(__v8du){0x0001000100000000, 0x0003000300020002, 0x0005000500040004, 0x0007000700060006, \
                       0x0009000900080008, 0x000b000b000a000a, 0x000d000d000c000c, 0x000f000f000e000e})
#define SPREAD_BYTES \
    ((__m256i)(__v4du){0x0302808001008080, 0x0706808005048080, 0x0b0a808009088080, 0x0f0e80800d0c8080})
// The other way: the lower half of each number, or the upper one, which is one word further on.
#define WORDS_OF(upper) \
    ((__m512i)((__v8du){0x0006000400020000, 0x000e000c000a0008, 0x0016001400120010, 0x001e001c001a0018} + \
               (upper) * 0x0001000100010001u))
#define BYTES_OF(upper) \
    ((__m256i)((__v4du){0x0d0c090805040100, 0, 0x0d0c090805040100, 0} + (upper) * 0x0202020202020202u))

#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define WIDTH 16
#define SQRT(x) ((FLOATS)_mm512_sqrt_ps((__m512)(x)))
#define FMA(a, b, c) ((FLOATS)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define FROM_HALF(x) ((FLOATS)_mm512_cvtph_ps((__m256i)(x)))
#define TO_HALF(x) ((SHORTS)_mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define FROM_UPPER(x) \
    ((FLOATS)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, SPREAD_WORDS, _mm512_castsi256_si512((__m256i)(x))))
#define FROM_SIGNED(x) ((INTEGERS)_mm512_cvtepi16_epi32((__m256i)(x)))
#define HALF(x, upper) \
    ((SHORTS)_mm512_castsi512_si256(_mm512_permutexvar_epi16(WORDS_OF(upper), (__m512i)(x))))
#define IF_NUMBER(x, yes, no) \
    ((INTEGERS)_mm512_mask_mov_epi32((__m512i)(no), \
                                     _mm512_cmp_ps_mask((__m512)(x), (__m512)(x), _CMP_ORD_Q), (__m512i)(yes)))
#define STREAM(to, x) _mm512_stream_ps(to, (__m512)(x))
#define FENCE() _mm_sfence()
#include "lanes.h"

#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define WIDTH 8
#define SQRT(x) ((FLOATS)_mm256_sqrt_ps((__m256)(x)))
#define FMA(a, b, c) ((FLOATS)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define FROM_HALF(x) ((FLOATS)_mm256_cvtph_ps((__m128i)(x)))
#define TO_HALF(x) ((SHORTS)_mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
#define FROM_UPPER(x) ((FLOATS)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)(x)), SPREAD_BYTES))
#define FROM_SIGNED(x) ((INTEGERS)_mm256_cvtepi16_epi32((__m128i)(x)))
#define HALF(x, upper) \
    ((SHORTS)_mm256_castsi256_si128( \
        _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)(x), BYTES_OF(upper)), 0x08)))
#define IF_NUMBER(x, yes, no) \
    ((INTEGERS)_mm256_blendv_ps((__m256)(no), (__m256)(yes), \
                                _mm256_cmp_ps((__m256)(x), (__m256)(x), _CMP_ORD_Q)))
#define STREAM(to, x) _mm256_stream_ps(to, (__m256)(x))
#define FENCE() _mm_sfence()
#include "lanes.h"

static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static int has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#elif defined(__aarch64__) && defined(__AARCH64EL__)
#include <arm_neon.h>

#define NAME(x) x##_neon
#define TARGET
#define WIDTH 4
#define SQRT(x) ((FLOATS)vsqrtq_f32((float32x4_t)(x)))
#define FMA(a, b, c) ((FLOATS)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define FROM_HALF(x) ((FLOATS)vcvt_f32_f16((float16x4_t)(x)))
#define TO_HALF(x) ((SHORTS)vcvt_f16_f32((float32x4_t)(x)))
#define FROM_UPPER(x) ((FLOATS)(__builtin_convertvector(x, INTEGERS) << 16))
#define FROM_SIGNED(x) ((__builtin_convertvector(x, INTEGERS) ^ 0x8000) - 0x8000)
#define HALF(x, upper) __builtin_convertvector((x) >> 16 * (upper), SHORTS)
#define IF_NUMBER(x, yes, no) ((INTEGERS)NAME(select)((INTEGERS)((x) == (x)), (FLOATS)(yes), (FLOATS)(no)))
#define STREAM(to, x) (*(NAME(floats_anywhere) *)(to) = (x))
#define FENCE()
#include "lanes.h"

static int always(void) { return 1; }
#endif

// The instruction sets, best first.
static const struct {
    const char *name;
    int (*present)(void);
    update_function *update;
    sum_function *sum;
    squares_function *squares;
} sets[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, update_avx512, sum_avx512, squares_avx512},
    {"avx2", has_avx2, update_avx2, sum_avx2, squares_avx2},
#elif defined(__aarch64__) && defined(__AARCH64EL__)
    {"neon", always, update_neon, sum_neon, squares_neon},
#endif
    {NULL, NULL, NULL, NULL, NULL},
};

// The numbers that must be the same in Python: of the interface, of a row's bytes and of a piece's.
int32_t zeromesh_interface(void) { return INTERFACE << 16 | (int32_t)sizeof(struct row) << 8 | (int32_t)sizeof(struct piece); }

// The name of a set, "" if this processor has it not, null after the last.
const char *zeromesh_instructions(int32_t set) {
    if (!sets[set].name) return NULL;
    return sets[set].present() ? sets[set].name : "";
}

// Blocks of work, which threads take as they come. Each block's result depends on nothing but the block.
struct work {
    void (*block)(const struct work *, int64_t index, int64_t *cursor);
    int64_t blocks, next;
    int32_t set, stream, type, to_type;
    const void *from;
    int64_t size;
    void *results;
    const struct row *rows;
};

static void *take(void *argument) {
    struct work *work = argument;
    int64_t index, cursor[2] = {0, 0};
    while ((index = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->blocks)
        work->block(work, index, cursor);
    return NULL;
}

// Threads are made for each call: nothing is kept that a fork could break. Where one cannot be made, fewer do the work.
static void run(struct work *work, int64_t threads) {
    pthread_t made[255];
    int64_t more = (threads < work->blocks ? threads : work->blocks) - 1, count = 0;
    if (more > 255) more = 255;
    while (count < more && !pthread_create(&made[count], NULL, take, work)) count++;
    take(work);
    while (count > 0) pthread_join(made[--count], NULL);
}

static int64_t blocks_of(int64_t size, int64_t block) { return size / block + (size % block > 0); }

// The cursor is the piece that is looked at and the block that it begins with; a thread's blocks only go up.
static void update_block(const struct work *work, int64_t index, int64_t *cursor) {
    const struct piece *pieces = work->from;
    int64_t blocks;
    while (index >= cursor[1] + (blocks = blocks_of(pieces[cursor[0]].elements, BLOCK))) {
        cursor[0] += 1;
        cursor[1] += blocks;
    }
    const struct piece *piece = &pieces[cursor[0]];
    int64_t begin = (index - cursor[1]) * BLOCK, end = begin + BLOCK;
    if (end > piece->elements) end = piece->elements;
    int stream = work->stream && piece->read[0] != piece->write[0];
    sets[work->set].update(&work->rows[piece->row], piece, begin, end, stream);
}

// One step for all pieces. `stream` says whether what is not in place is written past the caches.
void zeromesh_update(int32_t set, const struct row *rows, const struct piece *pieces, int64_t count, int32_t stream,
                     int32_t threads) {
    struct work work = {.block = update_block, .set = set, .stream = stream, .from = pieces, .rows = rows};
    for (int64_t i = 0; i < count; i++) work.blocks += blocks_of(pieces[i].elements, BLOCK);
    run(&work, threads);
}

static uint64_t mix(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * 0x9e3779b97f4a7c15u;  // odd: different words, different sums
    return sum << 29 | sum >> 35;              // so that high bits come to change low ones, too
}

// Eight sums at once, as a product waits for the one before.
static void checksum_block(const struct work *work, int64_t index, int64_t *cursor) {
    (void)cursor;
    int64_t begin = index * BYTES, size = work->size - begin < BYTES ? work->size - begin : BYTES;
    const char *from = (const char *)work->from + begin;
    uint64_t sums[8], words[8], total = mix((uint64_t)size, 0);
    for (int k = 0; k < 8; k++) sums[k] = mix((uint64_t)size, k + 1);
    int64_t i = 0;
    for (; i + 64 <= size; i += 64) {
        ASK(from, i, 8);
        memcpy(words, from + i, 64);
        for (int k = 0; k < 8; k++) sums[k] = mix(sums[k], words[k]);
    }
    if (i < size) {
        memset(words, 0, 64);
        memcpy(words, from + i, size - i);
        for (int k = 0; k < 8; k++) sums[k] = mix(sums[k], words[k]);
    }
    for (int k = 0; k < 8; k++) total = mix(total, sums[k]);
    ((uint64_t *)work->results)[index] = mix(total, total >> 32);
}

// The checksum of each BYTES bytes.
void zeromesh_checksum(const void *from, int64_t size, uint64_t *sums, int32_t threads) {
    struct work work = {.block = checksum_block, .from = from, .size = size, .results = sums,
                        .blocks = blocks_of(size, BYTES)};
    run(&work, threads);
}

static void squares_block(const struct work *work, int64_t index, int64_t *cursor) {
    (void)cursor;
    int64_t begin = index * BLOCK, size = work->size - begin < BLOCK ? work->size - begin : BLOCK;
    const char *from = (const char *)work->from + begin * bytes_of(work->type);
    ((double *)work->results)[index] = sets[work->set].squares(from, size, work->type);
}

// The sum of squares of each BLOCK elements of 16 or 32 bits.
void zeromesh_squares(int32_t set, const void *from, int32_t type, int64_t size, double *sums, int32_t threads) {
    struct work work = {.block = squares_block, .set = set, .type = type, .from = from, .size = size, .results = sums,
                        .blocks = blocks_of(size, BLOCK)};
    run(&work, threads);
}

static void add_block(const struct work *work, int64_t index, int64_t *cursor) {
    (void)cursor;
    int64_t begin = index * BLOCK, size = work->size - begin < BLOCK ? work->size - begin : BLOCK;
    const void *from = (const char *)work->from + begin * bytes_of(work->type);
    void *to = (char *)work->results + begin * bytes_of(work->to_type);
    sets[work->set].sum(&(struct sum){.parts = &from, .out = to, .count = 1, .add = 1, .type = work->type,
                                      .out_type = work->to_type}, size);
}

// Adds elements to others, of the same type or a wider one, of 16 or 32 bits.
void zeromesh_add(int32_t set, const void *from, int32_t type, void *to, int32_t to_type, int64_t size, int32_t threads) {
    struct work work = {.block = add_block, .set = set, .type = type, .to_type = to_type, .from = from, .size = size,
                        .results = to, .blocks = blocks_of(size, BLOCK)};
    run(&work, threads);
}

static void convert(int32_t set, const void *from, int32_t type, void *to, int32_t to_type, int64_t elements) {
    sets[set].sum(&(struct sum){.parts = &from, .out = to, .count = 1, .type = type, .out_type = to_type}, elements);
}

#define FEW 256

// Elements from i on, at most FEW, as doubles, by way of floats where they are of 16 bits.
static void read_doubles(int32_t set, const void *from, int64_t i, int32_t type, double *to, int64_t elements) {
    const char *first = (const char *)from + i * bytes_of(type);
    float floats[FEW];
    if (type == FLOAT64) {
        memcpy(to, first, elements * sizeof(double));
        return;
    }
    convert(set, first, type, floats, FLOAT32, elements);
    for (int64_t k = 0; k < elements; k++) to[k] = floats[k];
}

static void write_doubles(int32_t set, const double *from, void *to, int64_t i, int32_t type, int64_t elements) {
    char *first = (char *)to + i * bytes_of(type);
    float floats[FEW];
    if (type == FLOAT64) {
        memcpy(first, from, elements * sizeof(double));
        return;
    }
    for (int64_t k = 0; k < elements; k++) floats[k] = (float)from[k];
    convert(set, floats, FLOAT32, first, type, elements);
}

static void sum_doubles(int32_t set, const struct sum *sum, int64_t elements) {
    double total[FEW], next[FEW];
    for (int64_t i = 0; i < elements; i += FEW) {
        int64_t rest = elements - i < FEW ? elements - i : FEW;
        for (int k = 0; k < sum->count; k++) {
            read_doubles(set, sum->parts[k], i, sum->type, next, rest);
            for (int64_t j = 0; j < rest; j++) total[j] = k ? total[j] + next[j] : next[j];
            write_doubles(set, total, next, 0, sum->out_type, rest);  // rounded as `out` would be
            read_doubles(set, next, 0, sum->out_type, total, rest);
        }
        if (sum->add) {
            read_doubles(set, sum->out, i, sum->out_type, next, rest);
            for (int64_t j = 0; j < rest; j++) total[j] += next[j];
        }
        write_doubles(set, total, sum->out, i, sum->out_type, rest);
    }
}

void zeromesh_sum(int32_t set, const struct sum *sum, int64_t elements) {
    if (sum->type == FLOAT64 || sum->out_type == FLOAT64) sum_doubles(set, sum, elements);
    else sets[set].sum(sum, elements);
}
