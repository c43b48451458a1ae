/* The rules of blocks.h, compiled once for each width of vectors. What includes this defines VECTOR, WIDTH (its bytes),
   INTRINSIC(name), LOAD(place) and NAMED(function). */

typedef struct {
    VECTOR part[64 / WIDTH];
} NAMED(block_t);

/* `size`: 64 bytes, or 32 for a single element. */
static inline NAMED(block_t) NAMED(block_at)(place_t at, int size)
{
    NAMED(block_t) b;
    for (int i = 0; i < size / WIDTH; i++)
        b.part[i] = LOAD(at + WIDTH * i);
    return b;
}

#define MASK(size, b, condition)                                                                                       \
    ({                                                                                                                 \
        uint64_t mask_ = 0;                                                                                            \
        for (int i_ = 0; i_ < (size) / WIDTH; i_++) {                                                                  \
            const VECTOR v = (b).part[i_];                                                                             \
            mask_ |= (uint64_t)(uint32_t)INTRINSIC(movemask_epi8)(condition) << (WIDTH * i_);                          \
        }                                                                                                              \
        mask_;                                                                                                         \
    })

#define EACH(byte) INTRINSIC(set1_epi8)(byte)
#define SAME(vector, other) INTRINSIC(cmpeq_epi8)(vector, other)
#define IS(size, b, byte) MASK(size, b, SAME(v, EACH(byte)))
#define ARE_DIGITS(size, b)                                                                                            \
    MASK(size, b, SAME(INTRINSIC(max_epu8)(INTRINSIC(sub_epi8)(v, EACH('0')), EACH(9)), EACH(9)))

/* Of `[1,2,…]`, non-negative integers without needless zeros. */
static place_t NAMED(prove_integers)(place_t at, place_t end, long *count)
{
    uint64_t comma_was = 1, zero_was = 0, bad = 0;
    place_t proved = at;
    for (; end - at >= 64 && !bad; at += 64) {
        const NAMED(block_t) b = NAMED(block_at)(at, 64);
        const uint64_t comma = IS(64, b, ','), digit = ARE_DIGITS(64, b);
        const uint64_t start = behind(comma, &comma_was);
        bad = ~(comma | digit) | (comma & start) | (digit & behind(start & IS(64, b, '0'), &zero_was));
        proved = elements(comma, bad, at, proved, count);
    }
    return proved;
}

/* Of `["a","b",…]`, ASCII with no escapes but the frequent ones. */
static place_t NAMED(prove_strings)(place_t at, place_t end, long *count)
{
    uint64_t closing_was = 0, escape_was = 0, within_was = 0, bad = 0;
    place_t proved = at;
    for (; end - at >= 64 && !bad; at += 64) {
        const NAMED(block_t) b = NAMED(block_at)(at, 64);
        const uint64_t backslash = IS(64, b, '\\');
        uint64_t quote = IS(64, b, '"'), within, closing, comma;
        /* Control characters and what is beyond ASCII: as signed numbers, both are less than a space. */
        bad = MASK(64, b, INTRINSIC(cmpgt_epi8)(EACH(' '), v));
        if (backslash | escape_was) {
            const uint64_t escaped = behind(backslash, &escape_was);
            bad |= escaped & ~(IS(64, b, 'n') | IS(64, b, 't') | IS(64, b, 'r') | quote);
            quote &= ~escaped;
        }
        within = quote; /* of each byte: is the number of quotes up to it odd? */
        for (int distance = 1; distance < 64; distance *= 2)
            within ^= within << distance;
        within ^= within_was;
        within_was = -(within >> 63);
        closing = quote & ~within;
        comma = IS(64, b, ',') & ~within;
        /* Outside of strings, a comma behind each string, and nothing else. */
        bad |= ~(within | closing | comma) | (comma ^ behind(closing, &closing_was));
        proved = elements(comma, bad, at, proved, count);
    }
    return proved;
}

/* Of `[-0.25,-1.5e-05,0.0,…]`, logprobs that can be used: 0.0, or "-", up to three digits without a needless zero, a
   point, digits, and perhaps "e-" and digits. Such a number is over the floor, not positive and no overflow. */
static place_t NAMED(prove_logprobs)(place_t at, place_t end, long *count)
{
    while (end - at >= 34) {
        const NAMED(block_t) b = NAMED(block_at)(at, 32);
        const uint64_t comma = IS(32, b, ',');
        const uint64_t length = __builtin_ctzll(comma | (uint64_t)1 << 32);
        /* What is no digit: the sign, the point, and perhaps "e-". */
        const uint64_t others = ~ARE_DIGITS(32, b) & (((uint64_t)1 << length) - 1);
        const uint64_t from_point = others & ~(uint64_t)1;
        const uint64_t point = __builtin_ctzll(from_point | (uint64_t)1 << 32);
        const uint64_t exponent = from_point & (from_point - 1);
        const uint64_t e = __builtin_ctzll(exponent | (uint64_t)1 << 32);
        const int ends = (comma != 0) & (at[length - 1] != '.');
        const int signs = (at[0] == '-') & (at[point] == '.') & (point >= 2) & (point <= 4);
        const int leads = (at[1] != '0') | (point == 2);
        const int small = (at[e] == 'e') & (at[e + 1] == '-') & (exponent >> e == 3) & (e + 2 < length) & (e - 1 > point);
        if (ends & signs & leads & ((exponent == 0) | small))
            at += length + 1;
        else if (memcmp(at, "0.0,", 4) == 0)
            at += 4;
        else
            break;
        *count += 1;
    }
    return at;
}

/* Of `[{"a":-0.25},{"b":-1.5},…]`, candidates that are the sampled tokens once more. `name` and `logprob`: the places, in
   lists that lie before this one and have been proved, of the elements that belong to the one at `at`; all three go on
   together. */
static place_t NAMED(prove_repeats)(place_t at, place_t end, place_t *name, place_t *logprob)
{
    place_t a = *name, z = *logprob;
    while (end - at >= 68) {
        const NAMED(block_t) a_name = NAMED(block_at)(a, 32), a_logprob = NAMED(block_at)(z, 32);
        const uint64_t quote = IS(32, a_name, '"') & ~(uint64_t)1;
        const uint64_t stop = IS(32, a_logprob, ',') | IS(32, a_logprob, ']');
        const uint64_t name_end = __builtin_ctzll(quote | (uint64_t)1 << 31); /* its last byte */
        const uint64_t logprob_end = __builtin_ctzll(stop | (uint64_t)1 << 31);
        const place_t name_here = at + 1, logprob_here = name_here + name_end + 2;
        const NAMED(block_t) b_name = NAMED(block_at)(name_here, 32), b_logprob = NAMED(block_at)(logprob_here, 32);
        uint64_t unlike = IS(32, a_name, '\\'); /* the quote may be an escaped one */
        unlike |= ~MASK(32, b_name, SAME(v, a_name.part[i_]));
        unlike &= ((uint64_t)2 << name_end) - 1;
        unlike |= ~MASK(32, b_logprob, SAME(v, a_logprob.part[i_])) & (((uint64_t)1 << logprob_end) - 1);
        if ((unlike != 0) | (quote == 0) | (stop == 0) | (at[0] != '{') | (at[1] != '"') | (logprob_here[-1] != ':')
            | (logprob_here[logprob_end] != '}') | (logprob_here[logprob_end + 1] != ',')
            | (a[name_end + 1] != ',') | (z[logprob_end] != ','))
            break;
        at = logprob_here + logprob_end + 2;
        a += name_end + 2;
        z += logprob_end + 1;
    }
    *name = a;
    *logprob = z;
    return at;
}

#undef MASK
#undef EACH
#undef SAME
#undef IS
#undef ARE_DIGITS
#undef VECTOR
#undef WIDTH
#undef INTRINSIC
#undef LOAD
#undef NAMED
