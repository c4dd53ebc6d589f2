// The kernels for one instruction set. native.c includes this once for each, with
//   NAME(x)             x, named after the set
//   TARGET              the attribute that lets a function use its instructions
//   WIDTH               floats in a vector: 4, 8 or 16
//   SQRT, FMA           of vectors, rounded once
//   FROM_HALF, TO_HALF  between WIDTH halves in 16-bit integers and floats
//   FROM_UPPER          floats of which WIDTH 16-bit integers are the upper halves
//   FROM_SIGNED         WIDTH signed 16-bit integers, as wide ones
//   HALF(x, upper)      the upper or lower halves of wide integers
//   IF_NUMBER(x, y, n)  integers y where the float x is a number, and n where it is a NaN
//   STREAM              store to an aligned address, past the caches
//
// All is done lane by lane in the same order of roundings, and what is left at the end goes through whole vectors, too.
// So every set, cut and alignment gives the same bits. (But for the payload of a NaN made of two.)

#define INLINE static inline __attribute__((always_inline)) TARGET
#define FLOATS NAME(floats)
#define INTEGERS NAME(integers)
#define SHORTS NAME(shorts)

#define IS_NARROW(narrow, k) ((narrow) << 1 >> (k) & 1)  // of master and states by their index, the first state's is 1

typedef float FLOATS __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t INTEGERS __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t SHORTS __attribute__((vector_size(2 * WIDTH)));
typedef double NAME(doubles) __attribute__((vector_size(8 * WIDTH)));
typedef FLOATS NAME(floats_anywhere) __attribute__((aligned(4), may_alias));
typedef SHORTS NAME(shorts_anywhere) __attribute__((aligned(2), may_alias));

INLINE FLOATS NAME(load)(const float *from) { return *(const NAME(floats_anywhere) *)from; }

INLINE void NAME(store)(float *to, FLOATS x, int stream) {
    if (stream) STREAM(to, x);
    else *(NAME(floats_anywhere) *)to = x;
}

INLINE FLOATS NAME(select)(INTEGERS mask, FLOATS yes, FLOATS no) {
    return (FLOATS)((mask & (INTEGERS)yes) | (~mask & (INTEGERS)no));
}

// Elements from i on, whatever their type, as floats.
INLINE FLOATS NAME(widen)(const void *from, int64_t i, int type) {
    if (type == FLOAT32) return NAME(load)((const float *)from + i);
    SHORTS x = *(const NAME(shorts_anywhere) *)((const uint16_t *)from + i);
    if (type == FLOAT16) return FROM_HALF(x);
    return FROM_UPPER(x);
}

// Rounded to nearest, ties to even. A NaN stays one.
INLINE SHORTS NAME(to_bfloat)(FLOATS x) {
    INTEGERS bits = (INTEGERS)x;
    return HALF(IF_NUMBER(x, bits + 0x7fff + ((bits >> 16) & 1), bits | 0x400000), 1);
}

// 16 bits for each state from an element's own numbers, which zeromesh/base/kernels/rounding.py explains.
INLINE void NAME(random_bits)(FLOATS gradient, FLOATS master, uint32_t salt, INTEGERS random[2]) {
    INTEGERS x = ((INTEGERS)gradient ^ salt) * 0x7feb352d ^ (INTEGERS)master;
    x = (x ^ (x >> 15)) * 0x846ca68b;
    random[1] = x >> 16;
    random[0] = (x & 0xffff) ^ random[1];
}

// Rounded to one of the two next to it, by 16 random bits. They leave infinity what it is, and NaNs go without them.
INLINE SHORTS NAME(to_bfloat_randomly)(FLOATS x, INTEGERS random) {
    return HALF(IF_NUMBER(x, (INTEGERS)x + random, (INTEGERS)x), 1);
}

INLINE void NAME(narrow)(void *to, int64_t i, int type, FLOATS x) {
    if (type == FLOAT32) NAME(store)((float *)to + i, x, 0);
    else *(NAME(shorts_anywhere) *)((uint16_t *)to + i) = type == FLOAT16 ? TO_HALF(x) : NAME(to_bfloat)(x);
}

// The upper 16 bits and the signed lower ones, which zeromesh/base/kernels/halves.py explains, as the float they make up.
INLINE FLOATS NAME(join)(const uint16_t *upper, const uint16_t *lower) {
    INTEGERS high = (INTEGERS)FROM_UPPER(*(const NAME(shorts_anywhere) *)upper);
    return (FLOATS)(high + FROM_SIGNED(*(const NAME(shorts_anywhere) *)lower));
}

// The other way, of what a rule has computed: a NaN is a quiet one. It stays one, without what its lower bits said.
INLINE void NAME(split)(uint16_t *upper, uint16_t *lower, FLOATS x) {
    INTEGERS bits = IF_NUMBER(x, (INTEGERS)x, (INTEGERS)x & 0xffff0000);
    *(NAME(shorts_anywhere) *)upper = HALF(bits + 0x8000, 1);
    *(NAME(shorts_anywhere) *)lower = HALF(bits, 0);
}

// start + weight * (end - start), from the end that is nearer: exact at both.
INLINE FLOATS NAME(lerp)(FLOATS start, FLOATS end, float weight) {
    int near_start = weight < 0.5f;
    FLOATS coefficient = (FLOATS){0} + (near_start ? weight : weight - 1.0f);
    return FMA(coefficient, end - start, near_start ? start : end);
}

// One step of a rule, of a scaled gradient. States that it does not have are left alone.
INLINE void NAME(rule)(int rule, const struct row *row, FLOATS g, FLOATS *p, FLOATS *s, FLOATS *t) {
    const FLOATS zero = {0};
    FLOATS step = zero + row->step;
    if (row->weight_decay != 0) g = FMA(zero + row->weight_decay, *p, g);
    if (rule == ADAM) {
        *s = NAME(lerp)(*s, g, row->weight1);
        *t = FMA(row->weight2 * g, g, *t * row->beta2);
        FLOATS below = SQRT(*t) / row->root + row->eps;
        *p = *p * row->decay + step * *s / below;
    } else if (rule == SGD) {
        if (row->momentous) {
            *s = row->first ? g : FMA(zero + row->weight2, g, *s * row->beta2);
            g = row->nesterov ? FMA(zero + row->beta2, *s, g) : *s;
        }
        *p = FMA(step, g, *p);
    } else if (rule == LION) {
        FLOATS direction = NAME(lerp)(g, *s, row->weight1);
        FLOATS one = zero + 1.0f;
        FLOATS up = NAME(select)((INTEGERS)(direction > zero), one, zero);
        FLOATS down = NAME(select)((INTEGERS)(direction < zero), one, zero);
        *p = FMA(step, up - down, *p * row->decay);
        *s = NAME(lerp)(*s, g, row->weight2);
    } else {
        *s = FMA(g, g, *s);
        *p = *p + step * g / (SQRT(*s) + row->eps);
    }
}

// Asks for what the 32 elements from i on are to find, a line of memory of those that have 16 bits.
INLINE void NAME(ask)(int rule, const struct row *row, const struct piece *q, int64_t i, int halves, int narrow) {
    int states = rule == ADAM ? 2 : rule == SGD ? row->momentous : 1;
    ASK(q->gradient, 2 * i, 2);
    if (halves) ASK(q->remainder, 2 * i, 2);
    for (int k = 0; k <= states; k++) {
        int64_t wide = (k ? IS_NARROW(narrow, k) : halves) ? 2 : 4;
        ASK(q->read[k], wide * i, wide);
        if (wide == 4) ASK(q->read[k], wide * i + 64, wide);
    }
    if (q->parameter) ASK(q->parameter, 2 * i, 2);
}

// A vector of elements, from i on.
INLINE void NAME(advance)(int rule, const struct row *row, const struct piece *q, int64_t i, int stream, int halves,
                          int narrow) {
    FLOATS x[3] = {{0}};
    INTEGERS random[2] = {{0}};
    int states = rule == ADAM ? 2 : rule == SGD ? row->momentous : 1;
    if (halves) x[0] = NAME(join)((const uint16_t *)q->read[0] + i, q->remainder + i);
    for (int k = halves; k <= states; k++) x[k] = NAME(widen)(q->read[k], i, IS_NARROW(narrow, k) ? BFLOAT16 : FLOAT32);
    FLOATS g = NAME(widen)(q->gradient, i, q->gradient_type) * row->scale;
    if (narrow) NAME(random_bits)(g, x[0], row->salt, random);
    NAME(rule)(rule, row, g, &x[0], &x[1], &x[2]);
    if (halves) NAME(split)((uint16_t *)q->write[0] + i, q->new_remainder + i, x[0]);
    for (int k = halves; k <= states; k++)
        if (IS_NARROW(narrow, k))
            *(NAME(shorts_anywhere) *)((uint16_t *)q->write[k] + i) = NAME(to_bfloat_randomly)(x[k], random[k - 1]);
        else NAME(store)((float *)q->write[k] + i, x[k], stream);
    if (q->parameter) NAME(narrow)(q->parameter, i, q->parameter_type, x[0]);
}

INLINE void NAME(elements)(int rule, const struct row *given, const struct piece *whole, int64_t begin, int64_t end,
                           int stream, int halves, int narrow) {
    struct row row = *given;
    struct piece q = *whole;
    int64_t i = begin;
    for (; i + WIDTH <= end; i += WIDTH) {
        if (i % 32 == 0) NAME(ask)(rule, &row, &q, i, halves, narrow);
        NAME(advance)(rule, &row, &q, i, stream, halves, narrow);
    }
    if (i == end) return;
    // The rest, in copies with zeros behind.
    float state[3][WIDTH] = {{0}}, gradient[WIDTH] = {0}, parameter[WIDTH] = {0};
    int64_t rest = end - i, wide = bytes_of(q.gradient_type), out = bytes_of(q.parameter_type);
    int64_t each[3] = {halves ? 2 : 4, IS_NARROW(narrow, 1) ? 2 : 4, IS_NARROW(narrow, 2) ? 2 : 4};
    uint16_t remainder[WIDTH] = {0};
    struct piece small = q;
    memcpy(gradient, (const char *)q.gradient + wide * i, wide * rest);
    small.gradient = gradient;
    for (int k = 0; k < 3; k++)
        if (q.read[k]) {
            memcpy(state[k], (const char *)q.read[k] + each[k] * i, each[k] * rest);
            small.read[k] = small.write[k] = state[k];
        }
    if (halves) {
        memcpy(remainder, q.remainder + i, 2 * rest);
        small.remainder = small.new_remainder = remainder;
    }
    if (q.parameter) small.parameter = parameter;
    NAME(advance)(rule, &row, &small, 0, 0, halves, narrow);
    for (int k = 0; k < 3; k++)
        if (q.write[k]) memcpy((char *)q.write[k] + each[k] * i, state[k], each[k] * rest);
    if (halves) memcpy(q.new_remainder + i, remainder, 2 * rest);
    if (q.parameter) memcpy((char *)q.parameter + out * i, parameter, out * rest);
}

TARGET static void NAME(update)(const struct row *row, const struct piece *q, int64_t begin, int64_t end, int stream) {
    // Streams need aligned addresses. Halves of a master are not streamed, nor is what has states in bf16.
    int halves = q->remainder != NULL, narrow = q->narrow;
    for (int k = halves; k < 3; k++)
        if (q->write[k] && (uintptr_t)((float *)q->write[k] + begin) % (4 * WIDTH)) stream = 0;
    if (narrow) stream = 0;
#define CASE(rule)                                                                      \
    case rule:                                                                          \
        if (halves && narrow == 3) NAME(elements)(rule, row, q, begin, end, 0, 1, 3);   \
        else if (narrow == 3) NAME(elements)(rule, row, q, begin, end, 0, 0, 3);        \
        else if (narrow) NAME(elements)(rule, row, q, begin, end, 0, halves, narrow);   \
        else if (halves && stream) NAME(elements)(rule, row, q, begin, end, 1, 1, 0);   \
        else if (halves) NAME(elements)(rule, row, q, begin, end, 0, 1, 0);             \
        else if (stream) NAME(elements)(rule, row, q, begin, end, 1, 0, 0);             \
        else NAME(elements)(rule, row, q, begin, end, 0, 0, 0);                         \
        break
    switch (row->rule) {
        CASE(ADAM);
        CASE(SGD);
        CASE(LION);
        CASE(ADAGRAD);
    }
#undef CASE
    if (stream) FENCE();
}

// Elements from i on, with zeros behind the last of `rest`.
INLINE FLOATS NAME(some)(const void *from, int64_t i, int64_t rest, int type) {
    char few[4 * WIDTH] = {0};
    if (rest >= WIDTH) return NAME(widen)(from, i, type);
    memcpy(few, (const char *)from + i * bytes_of(type), rest * bytes_of(type));
    return NAME(widen)(few, 0, type);
}

INLINE FLOATS NAME(rounded)(FLOATS x, int type) {
    char narrow[4 * WIDTH];
    if (type == FLOAT32) return x;
    NAME(narrow)(narrow, 0, type, x);
    return NAME(widen)(narrow, 0, type);
}

INLINE void NAME(add)(const struct sum *sum, int64_t elements, int type, int out_type) {
    for (int64_t i = 0; i < elements; i += WIDTH) {
        int64_t rest = elements - i;
        FLOATS total = NAME(rounded)(NAME(some)(sum->parts[0], i, rest, type), out_type);
        for (int k = 1; k < sum->count; k++)
            total = NAME(rounded)(total + NAME(some)(sum->parts[k], i, rest, type), out_type);
        if (sum->add) total = NAME(some)(sum->out, i, rest, out_type) + total;
        if (rest >= WIDTH) {
            NAME(narrow)(sum->out, i, out_type, total);
        } else {
            char few[4 * WIDTH];
            NAME(narrow)(few, 0, out_type, total);
            memcpy((char *)sum->out + i * bytes_of(out_type), few, rest * bytes_of(out_type));
        }
    }
}

TARGET static void NAME(sum)(const struct sum *sum, int64_t elements) {
    // One loop for each pair of types that is usual, as a loop that looks at the types is slower.
    if (sum->type == FLOAT32 && sum->out_type == FLOAT32) NAME(add)(sum, elements, FLOAT32, FLOAT32);
    else if (sum->type == BFLOAT16 && sum->out_type == FLOAT32) NAME(add)(sum, elements, BFLOAT16, FLOAT32);
    else if (sum->type == FLOAT16 && sum->out_type == FLOAT32) NAME(add)(sum, elements, FLOAT16, FLOAT32);
    else if (sum->type == BFLOAT16 && sum->out_type == BFLOAT16) NAME(add)(sum, elements, BFLOAT16, BFLOAT16);
    else NAME(add)(sum, elements, sum->type, sum->out_type);
}

// The sum of squares, in 16 lanes of doubles: sums in fp32 lose digits, and squares of large numbers overflow.
INLINE double NAME(add_squares)(const void *from, int64_t elements, int type) {
    NAME(doubles) x, sums[16 / WIDTH] = {{0}};
    double lanes[16], total = 0;
    int64_t i = 0;
    for (; i + 16 <= elements; i += 16) {
        ASK(from, i * bytes_of(type), bytes_of(type));
        for (int k = 0; k < 16 / WIDTH; k++) {
            x = __builtin_convertvector(NAME(widen)(from, i + k * WIDTH, type), NAME(doubles));
            sums[k] += x * x;
        }
    }
    for (int k = 0; i < elements; k++, i += WIDTH) {
        x = __builtin_convertvector(NAME(some)(from, i, elements - i, type), NAME(doubles));
        sums[k] += x * x;
    }
    memcpy(lanes, sums, sizeof lanes);
    for (int k = 0; k < 16; k++) total += lanes[k];
    return total;
}

TARGET static double NAME(squares)(const void *from, int64_t elements, int type) {
    if (type == FLOAT32) return NAME(add_squares)(from, elements, FLOAT32);
    if (type == BFLOAT16) return NAME(add_squares)(from, elements, BFLOAT16);
    return NAME(add_squares)(from, elements, FLOAT16);
}

#undef INLINE
#undef IS_NARROW
#undef FLOATS
#undef INTEGERS
#undef SHORTS
#undef NAME
#undef TARGET
#undef WIDTH
#undef SQRT
#undef FMA
#undef FROM_HALF
#undef TO_HALF
#undef FROM_UPPER
#undef FROM_SIGNED
#undef HALF
#undef IF_NUMBER
#undef STREAM
#undef FENCE
