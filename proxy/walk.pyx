# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Finds in one walk over a reply's or an event's bytes which logprobs are surely usable. Core.

Does what ``scan``, ``events`` and ``direct`` do in Python where this could not be compiled, faster and for any layout.
What it does not know is left to ``proxy.logprobs``, which decides: so a wrong no costs time, a wrong yes would let a bad
number pass, and every step errs towards no.

Each function takes the place where a value begins and returns the place behind it, or NULL where it is another.
Python ends every bytes object with a NUL, which belongs to no JSON value; since no step passes a byte that it has not
looked at, none passes the end. Digits and strings are looked at eight bytes at a time while there are as many, and long
lists first by ``blocks.h``, which proves the usual elements by the dozen.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport uint64_t
from libc.string cimport memcmp, memcpy, memset, strlen

import sys

if sys.byteorder != "little":
    raise ImportError("reads eight bytes at a time, the first as the lowest")

cdef extern from *:
    int __builtin_ctzll(unsigned long long) noexcept nogil

ctypedef const unsigned char *Place

cdef extern from "blocks.h":
    Place prove_integers(Place at, Place end, long *count) noexcept nogil
    Place prove_strings(Place at, Place end, long *count) noexcept nogil
    Place prove_logprobs(Place at, Place end, long *count) noexcept nogil
    Place prove_repeats(Place at, Place end, Place *name, Place *logprob) noexcept nogil

cdef enum:
    BY_ITSELF = 64  # bytes that are looked at element by element where a block proved nothing more
    DEEPEST = 64
    PLAIN = 1  # what stands for itself in a string
    DIGIT = 2
    SPACE = 4
    ESCAPED = 8  # what may follow a backslash, but for u
    HEX = 16

cdef extern from *:
    """
    #define ONES 0x0101010101010101ULL
    #define HIGHEST 0x8080808080808080ULL
    """
    const uint64_t ONES, HIGHEST

cdef unsigned char KIND[256]
for _byte in range(256):
    KIND[_byte] = (
        (PLAIN if 0x20 <= _byte < 0x80 and _byte not in b'"\\' else 0)
        | (DIGIT if _byte in b"0123456789" else 0)
        | (SPACE if _byte in b" \t\n\r" else 0)
        | (ESCAPED if _byte in b'"\\/bfnrt' else 0)
        | (HEX if _byte in b"0123456789abcdefABCDEF" else 0)
    )


cdef struct Walk:
    Place end
    Place last_eight  # the last place with eight bytes
    bint null_candidates  # a null among the candidates may stay as it is


cdef struct Choice:
    long index
    long count  # sampled positions
    long doubtful  # those of them that are not surely usable
    bint of_entries  # chat's, else parallel lists
    Place values
    Place top  # the list of candidates, if there is one beside the values
    Place names  # the list of names, if all of them may be ids
    Place close  # the brace that ends the logprobs object


cdef inline Place space(Place at) noexcept nogil:
    while KIND[at[0]] & SPACE:
        at += 1
    return at


cdef inline Place digits(Place at, Walk *walk) noexcept nogil:
    """None or more."""
    cdef uint64_t eight
    while at <= walk.last_eight:
        memcpy(&eight, at, 8)
        eight ^= <uint64_t>0x3030303030303030
        # The highest bit of each byte over 9: the lowest of them is the first that is no digit.
        eight = (((eight & <uint64_t>0x7F7F7F7F7F7F7F7F) + <uint64_t>0x7676767676767676) | eight) & HIGHEST
        if eight:
            return at + (__builtin_ctzll(eight) >> 3)
        at += 8
    while KIND[at[0]] & DIGIT:
        at += 1
    return at


cdef inline uint64_t zeros(uint64_t eight) noexcept nogil:
    """The highest bit of each byte that is 0, and perhaps of some behind the first of these."""
    return (eight - ONES) & ~eight & HIGHEST


cdef inline Place plain(Place at, Walk *walk) noexcept nogil:
    """Behind the ASCII that stands for itself in a string."""
    cdef uint64_t eight, others
    while at <= walk.last_eight:
        memcpy(&eight, at, 8)
        others = zeros(eight ^ (ONES * c'"')) | zeros(eight ^ (ONES * c"\\"))
        others |= ((eight - ONES * 0x20) & ~eight | eight) & HIGHEST
        if others:
            return at + (__builtin_ctzll(others) >> 3)
        at += 8
    while KIND[at[0]] & PLAIN:
        at += 1
    return at


cdef Place beyond_ascii(Place at) noexcept nogil:
    """One character in UTF-8 of two bytes or more."""
    cdef int first = at[0], length
    if first < 0xC2 or first > 0xF4:
        return NULL
    if (first == 0xE0 and at[1] < 0xA0) or (first == 0xED and at[1] > 0x9F):  # too long; a surrogate
        return NULL
    if (first == 0xF0 and at[1] < 0x90) or (first == 0xF4 and at[1] > 0x8F):  # too long; beyond Unicode
        return NULL
    length = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    for first in range(1, length):
        if at[first] & 0xC0 != 0x80:
            return NULL
    return at + length


cdef inline Place string(Place at, Walk *walk) noexcept nogil:
    if at[0] != c'"':
        return NULL
    at += 1
    while at != NULL:
        at = plain(at, walk)
        if at[0] == c'"':
            return at + 1
        if at[0] >= 0x80:
            at = beyond_ascii(at)
        elif at[0] != c"\\":
            return NULL
        elif KIND[at[1]] & ESCAPED:
            at += 2
        elif at[1] == c"u" and KIND[at[2]] & HEX and KIND[at[3]] & HEX and KIND[at[4]] & HEX and KIND[at[5]] & HEX:
            at += 6
        else:
            return NULL
    return NULL


cdef inline Place fraction(Place at, Walk *walk) noexcept nogil:
    """What may follow the digits of an integer, but no positive exponent: what is small stays small."""
    cdef Place first
    if at[0] == c".":
        first = at + 1
        at = digits(first, walk)
        if at == first:
            return NULL
    if at[0] == c"e" or at[0] == c"E":
        if at[1] != c"-":
            return NULL
        first = at + 2
        at = digits(first, walk)
        if at == first:
            return NULL
    return at


cdef inline Place usable(Place at, Walk *walk) noexcept nogil:
    """A logprob that is surely over the floor and not over the tolerance (proxy.unscorable)."""
    cdef Place first
    if at[0] != c"-":
        if at[0] != c"0":
            return NULL
        at += 1
        # 0.000… is under the tolerance of 1e-3 whatever follows, and so is a shorter row of zeros.
        first = at + 1
        if at[0] == c"." and not (
            first[0] == c"0" and (not KIND[first[1]] & DIGIT or first[1] == c"0")
            and (not KIND[first[1]] & DIGIT or not KIND[first[2]] & DIGIT or first[2] == c"0")
        ):
            return NULL
        return fraction(at, walk)
    first = at + 1
    at = integer(first, walk)
    # Of four digits 9999 alone reaches the floor; which is not worth telling from the other nines.
    return fraction(at, walk) if at != NULL and (at - first < 4 or (at - first == 4 and first[0] != c"9")) else NULL


cdef inline Place integer(Place at, Walk *walk) noexcept nogil:
    """Digits, without a zero before others."""
    cdef Place end
    if at[0] == c"0":
        return at + 1
    end = digits(at, walk)
    return end if end != at else NULL


cdef inline Place finite(Place at, Walk *walk) noexcept nogil:
    """A number that is no overflow."""
    cdef Place first = at + 1 if at[0] == c"-" else at
    at = integer(first, walk)
    return fraction(at, walk) if at != NULL and at - first < 300 else NULL


cdef inline Place scalar(Place at, Walk *walk) noexcept nogil:
    """What may stand for a logprob that is none: any number, null, NaN or an infinity."""
    cdef Place first
    if at[0] == c"n":
        return word(at, b"null")
    if at[0] == c"N":
        return word(at, b"NaN")
    if at[0] == c"-":
        at += 1
    if at[0] == c"I":
        return word(at, b"Infinity")
    at = integer(at, walk)
    if at == NULL:
        return NULL
    if at[0] == c".":
        first = at + 1
        at = digits(first, walk)
        if at == first:
            return NULL
    if at[0] == c"e" or at[0] == c"E":
        first = at + 2 if at[1] == c"-" or at[1] == c"+" else at + 1
        at = digits(first, walk)
        if at == first:
            return NULL
    return at


cdef inline Place sampled(Place at, Walk *walk, Choice *one) noexcept nogil:
    """The logprob of one position."""
    cdef Place end = usable(at, walk)
    if end == NULL:
        end = scalar(at, walk)
        one.doubtful += 1
    one.count += 1
    return end


cdef inline Place candidate(Place at, Walk *walk) noexcept nogil:
    if walk.null_candidates and at[0] == c"n":
        return word(at, b"null")
    return finite(at, walk)


cdef inline Place word(Place at, const char *text) noexcept nogil:
    cdef size_t i = 0
    while text[i]:  # not memcmp, which may look behind the end
        if at[i] != <unsigned char>text[i]:
            return NULL
        i += 1
    return at + i


cdef inline bint is_word(Place at, Place end, const char *text) noexcept nogil:
    """The string from ``at`` to ``end``, quotes and all, is ``text``."""
    cdef size_t length = strlen(text)
    return <size_t>(end - at) == length + 2 and memcmp(at + 1, text, length) == 0


cdef inline Place after(Place at, unsigned char closing, bint *more) noexcept nogil:
    """Behind the comma, or the closing bracket, that follows an element."""
    at = space(at)
    more[0] = at[0] == c","
    if more[0]:
        return space(at + 1)
    return at + 1 if at[0] == closing else NULL


cdef inline Place opened(Place at, unsigned char bracket, unsigned char closing, bint *more) noexcept nogil:
    """Behind an opening bracket, and behind the closing one where there is nothing between."""
    more[0] = False
    if at[0] != bracket:
        return NULL
    at = space(at + 1)
    more[0] = at[0] != closing
    return at if more[0] else at + 1


cdef inline Place key(Place at, Place *end, Walk *walk) noexcept nogil:
    """Behind the colon; ``end``: behind the key. A key with an escape may be any key."""
    cdef Place inside
    end[0] = string(at, walk)
    if end[0] == NULL:
        return NULL
    inside = at
    while inside < end[0]:
        if inside[0] == c"\\":
            return NULL
        inside += 1
    at = space(end[0])
    return space(at + 1) if at[0] == c":" else NULL


cdef Place value(Place at, Walk *walk, int depth) noexcept nogil:
    """Any JSON value."""
    cdef bint more
    cdef unsigned char closing
    if at[0] == c'"':
        return string(at, walk)
    if at[0] == c"n":
        return word(at, b"null")
    if at[0] == c"t":
        return word(at, b"true")
    if at[0] == c"f":
        return word(at, b"false")
    if at[0] != c"{" and at[0] != c"[":
        return finite(at, walk)
    if depth == DEEPEST:
        return NULL
    closing = at[0] + 2
    at = opened(at, at[0], closing, &more)
    while at != NULL and more:
        if closing == c"}":
            at = string(at, walk)
            if at == NULL:
                return NULL
            at = space(at)
            if at[0] != c":":
                return NULL
            at = space(at + 1)
        at = value(at, walk, depth + 1)
        if at != NULL:
            at = after(at, closing, &more)
    return at


cdef Place ids(Place at, long *count, Walk *walk) noexcept nogil:
    cdef bint more
    cdef Place retry
    count[0] = 0
    at = retry = opened(at, c"[", c"]", &more)
    while at != NULL and more:
        if at >= retry:
            at = space(prove_integers(at, walk.end, count))
            retry = at + BY_ITSELF
        at = integer(at, walk)
        if at != NULL:
            count[0] += 1
            at = after(at, c"]", &more)
    return at


cdef Place logprobs_list(Place at, Walk *walk, Choice *one) noexcept nogil:
    cdef bint more
    cdef Place retry
    at = retry = opened(at, c"[", c"]", &more)
    while at != NULL and more:
        if at >= retry:
            at = space(prove_logprobs(at, walk.end, &one.count))
            retry = at + BY_ITSELF
        at = sampled(at, walk, one)
        if at != NULL:
            at = after(at, c"]", &more)
    return at


cdef inline bint may_name(Place at, Place end) noexcept nogil:
    """The string may be ``token_id:N``: it begins so, or has an escape that stands for a letter it could be."""
    if at[1] == c"t" and word(at, b'"token_id:') != NULL:
        return True
    while at < end:
        if at[0] == c"\\":
            if at[1] == c"u" and at[2] == c"0" and at[3] == c"0" and at[4] >= c"2":
                return True
            at += 1
        at += 1
    return False


cdef Place names_list(Place at, long *count, bint *named, Walk *walk) noexcept nogil:
    """``named``: every name may be a token's id."""
    cdef bint more
    cdef Place end, retry
    count[0] = 0
    named[0] = True
    at = retry = opened(at, c"[", c"]", &more)
    while at != NULL and more:
        if at >= retry and not named[0]:
            at = space(prove_strings(at, walk.end, count))
            retry = at + BY_ITSELF
        end = string(at, walk)
        if end == NULL:
            return NULL
        named[0] = named[0] and may_name(at, end)
        count[0] += 1
        at = after(end, c"]", &more)
    return at


cdef bint are_names(Place names, Place ids, Walk *walk) noexcept nogil:
    """Two lists that have been walked over, of one length: ``"token_id:N"`` for each ``N``."""
    cdef bint more
    cdef Place end
    names = opened(names, c"[", c"]", &more)
    ids = opened(ids, c"[", c"]", &more)
    while more:
        names = word(names, b'"token_id:')
        if names == NULL:
            return False
        end = digits(ids, walk)
        while ids < end:
            if names[0] != ids[0]:
                return False
            names += 1
            ids += 1
        if names[0] != c'"':
            return False
        names = after(names + 1, c"]", &more)
        ids = after(ids, c"]", &more)
    return True


cdef Place candidates(Place at, Walk *walk, bint *some) noexcept nogil:
    """Of completions, at one position: an object or null. ``some``: there is one."""
    cdef bint more
    if at[0] == c"n":
        some[0] = False
        return word(at, b"null")
    at = opened(at, c"{", c"}", &more)
    some[0] = more
    while at != NULL and more:
        at = string(at, walk)
        if at == NULL:
            return NULL
        at = space(at)
        if at[0] != c":":
            return NULL
        at = candidate(space(at + 1), walk)
        if at != NULL:
            at = after(at, c"}", &more)
    return at


cdef Place candidates_list(Place at, Walk *walk, Place names, Place values) noexcept nogil:
    """``names`` and ``values``: lists before this one of one length, all values usable, or NULL."""
    cdef bint more, some, more_names = False, more_values
    names = opened(names, c"[", c"]", &more_names) if names != NULL and values != NULL else NULL
    values = opened(values, c"[", c"]", &more_values) if more_names else NULL
    at = opened(at, c"[", c"]", &more)
    while at != NULL and more:
        if more_names:
            at = space(prove_repeats(at, walk.end, &names, &values))
            names = after(string(space(names), walk), c"]", &more_names)
            values = after(finite(space(values), walk), c"]", &more_values)
        at = candidates(at, walk, &some)
        if at != NULL:
            at = after(at, c"]", &more)
    return at


cdef Place other_entry(Place at, Walk *walk) noexcept nogil:
    """Of chat: a candidate."""
    cdef bint more
    cdef Place end, begin
    at = opened(at, c"{", c"}", &more)
    while at != NULL and more:
        begin = at
        at = key(at, &end, walk)
        if at == NULL:
            return NULL
        at = candidate(at, walk) if is_word(begin, end, b"logprob") else value(at, walk, 0)
        if at != NULL:
            at = after(at, c"}", &more)
    return at


cdef Place other_entries(Place at, Walk *walk) noexcept nogil:
    cdef bint more
    if at[0] == c"n":
        return word(at, b"null")
    at = opened(at, c"[", c"]", &more)
    while at != NULL and more:
        at = other_entry(at, walk)
        if at != NULL:
            at = after(at, c"]", &more)
    return at


cdef Place entry(Place at, Walk *walk, Choice *one, Place *found) noexcept nogil:
    """Of chat: the sampled token. ``found``: where its logprob is."""
    cdef bint more, has_token = False, has_top = False
    cdef Place end, begin
    found[0] = NULL
    at = opened(at, c"{", c"}", &more)
    while at != NULL and more:
        begin = at
        at = key(at, &end, walk)
        if at == NULL:
            return NULL
        if is_word(begin, end, b"logprob"):
            if found[0] != NULL:
                return NULL
            found[0] = at
            at = sampled(at, walk, one)
        elif is_word(begin, end, b"token"):
            end = string(at, walk)
            if has_token or end == NULL or may_name(at, end):
                return NULL
            has_token = True
            at = end
        elif is_word(begin, end, b"top_logprobs"):
            if has_top:
                return NULL
            has_top = True
            at = other_entries(at, walk)
        elif is_word(begin, end, b"token_id"):
            return NULL
        else:
            at = value(at, walk, 0)
        if at != NULL:
            at = after(at, c"}", &more)
    return at if found[0] != NULL else NULL


cdef Place entries(Place at, Walk *walk, Choice *one) noexcept nogil:
    cdef bint more
    cdef Place found
    at = opened(at, c"[", c"]", &more)
    while at != NULL and more:
        at = entry(at, walk, one, &found)
        if at != NULL:
            at = after(at, c"]", &more)
    return at


cdef Place logprobs(Place at, Walk *walk, Choice *one) noexcept nogil:
    cdef bint more, named
    cdef long names_count = -1, offsets
    cdef Place end, begin, names = NULL, values
    at = opened(at, c"{", c"}", &more)
    while at != NULL and more:
        begin = at
        at = key(at, &end, walk)
        if at == NULL:
            return NULL
        one.of_entries |= is_word(begin, end, b"content")
        if is_word(begin, end, b"token_logprobs") or is_word(begin, end, b"content"):
            if one.values != NULL:
                return NULL
            one.values = at
            at = entries(at, walk, one) if one.of_entries else logprobs_list(at, walk, one)
        elif is_word(begin, end, b"tokens"):
            if names_count >= 0:
                return NULL
            names = at
            at = names_list(at, &names_count, &named, walk)
            if named:
                one.names = names
        elif is_word(begin, end, b"top_logprobs"):
            if one.top != NULL:
                return NULL
            one.top = at
            values = one.values if names_count == one.count and not one.doubtful and not one.of_entries else NULL
            at = word(at, b"null") if at[0] == c"n" else candidates_list(at, walk, names, values)
        elif is_word(begin, end, b"unscorable"):
            return NULL
        elif is_word(begin, end, b"text_offset") and at[0] == c"[":
            at = ids(at, &offsets, walk)
        else:
            at = value(at, walk, 0)
        if at != NULL:
            at = after(at, c"}", &more)
    if at == NULL or one.values == NULL or (names_count >= 0 and names_count != one.count):
        return NULL
    one.close = at - 1
    return at


cdef Place choice(Place at, Walk *walk, Choice *one) noexcept nogil:
    cdef bint more, has_index = False, has_ids = False
    cdef long ids_count = 0
    cdef Place end, begin, ids_at = NULL
    at = opened(at, c"{", c"}", &more)
    while at != NULL and more:
        begin = at
        at = key(at, &end, walk)
        if at == NULL:
            return NULL
        if is_word(begin, end, b"logprobs"):
            if one.values != NULL:
                return NULL
            at = logprobs(at, walk, one)
        elif is_word(begin, end, b"token_ids"):
            if has_ids:
                return NULL
            has_ids = True
            if at[0] == c"n":
                at = word(at, b"null")
            else:
                ids_at = at
                at = ids(at, &ids_count, walk)
        elif is_word(begin, end, b"index"):
            begin = at
            at = integer(at, walk)
            if has_index or at == NULL or at - begin > 8:
                return NULL
            has_index = True
            one.index = 0
            while begin < at:
                one.index = one.index * 10 + (begin[0] - c"0")
                begin += 1
        else:
            at = value(at, walk, 0)
        if at != NULL:
            at = after(at, c"}", &more)
    if at == NULL or one.values == NULL or (ids_at != NULL and ids_count != one.count):
        return NULL
    if one.names != NULL and ids_at != NULL and one.count and not are_names(one.names, ids_at, walk):
        return NULL
    return at


cdef tuple doubts(Choice *one, Walk *walk, Place body):
    """Of a choice that was walked over: (position, start, end, kind) of each doubtful position, and the kinds."""
    cdef bint more, more_top = False, known = one.of_entries, last_known = False
    cdef long position = 0, kind = -1
    cdef Place at, end, start, top = NULL, last = NULL
    cdef Choice here
    cdef list found = []
    cdef dict kinds = {}
    if not known and one.top != NULL and one.top[0] == c"[":
        top = opened(one.top, c"[", c"]", &more_top)
    at = opened(one.values, c"[", c"]", &more)
    while more:
        if not one.of_entries:
            known = False
            if more_top:
                top = after(candidates(top, walk, &known), c"]", &more_top)
        here.doubtful = 0
        start = at
        at = entry(at, walk, &here, &start) if one.of_entries else sampled(at, walk, &here)
        if here.doubtful:
            end = scalar(start, walk)
            # A bad value is mostly the one before it once more.
            if last == NULL or known != last_known or memcmp(start, last, end - start + 1):
                kind = kinds.setdefault((start[: end - start], known), len(kinds))
                last, last_known = start, known
            found.append((position, start - body, end - body, kind))
        position += 1
        at = after(at, c"]", &more)
    return found, list(kinds)


cdef Place reply(Place at, Walk *walk, Place body, list found) except? NULL:
    cdef bint more, inner
    cdef Place end, begin
    cdef Choice one
    at = opened(at, c"{", c"}", &more)
    while at != NULL and more:
        begin = at
        at = key(at, &end, walk)
        if at == NULL:
            return NULL
        if is_word(begin, end, b"choices"):
            if found:
                return NULL
            at = opened(at, c"[", c"]", &inner)
            while at != NULL and inner:
                memset(&one, 0, sizeof(one))
                one.index = len(found)
                at = choice(at, walk, &one)
                if at != NULL:
                    doubtful, kinds = doubts(&one, walk, body) if one.doubtful else ([], [])
                    found.append((one.index, one.count, doubtful, kinds, one.close - body))
                    at = after(at, c"]", &inner)
        else:
            at = value(at, walk, 0)
        if at != NULL:
            at = after(at, c"}", &more)
    return at


def survey(body: bytes | bytearray, null_candidates: bool) -> list | None:
    """(index, number of sampled positions, doubtful ones, their kinds, end of its logprobs object) of each choice.

    A doubtful position is (position, start and end of its JSON value in ``body``, kind), a kind (JSON value, whether
    there are candidates beside it); every other position is proved usable. None where the body is no reply with logprobs
    of the known kinds in every choice, one for each name and token id. ``null_candidates``: a null among the candidates may stay as it is; else it gives None, as
    NaN there does.
    """
    cdef Walk walk
    cdef list found = []
    cdef Place begin, end
    if isinstance(body, bytes):
        begin = <Place>PyBytes_AS_STRING(body)
    elif isinstance(body, bytearray):
        begin = <Place>PyByteArray_AS_STRING(body)
    else:
        raise TypeError(f"bytes or bytearray, not {type(body).__name__}")
    walk.end = begin + len(body)
    walk.last_eight = walk.end - 8
    walk.null_candidates = null_candidates
    end = reply(space(begin), &walk, begin, found)
    return found if end != NULL and space(end) - begin == len(body) and found else None


def room(length: int) -> bytearray:
    """So many bytes to be written over: ``bytearray(length)`` without the time that zeros take."""
    return PyByteArray_FromStringAndSize(NULL, length)
