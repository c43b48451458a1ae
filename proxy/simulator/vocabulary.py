"""The simulator's 512 tokens: three specials, the 256 bytes in byte-level BPE order, and words. Pure.

Ids of specials and bytes, and the few pieces named below, are those of the tiny model the fixtures were captured from.
"""

from collections.abc import Iterable

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, EOS = 0, 2
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = (*_PRINTABLE, *(b for b in range(256) if b not in set(_PRINTABLE)))
_PIECES = {279: "is", 300: "ar", 384: "ant", 458: "ser"}
_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so said what up its "
    "about into than them can only other new some could time these two may then do first any my now such like our "
    "over man me even most made after also did many before must through back years where much your way well down "
    "should because each just those people how too little state good very make world still own see men work long get "
    "here between both life being under never day same another know while last might us great old year off come since "
    "against go came right used take three token model reward policy prompt answer number equals because therefore "
    "step sum proof check value plus minus times divided root prime even odd set function loop array string index key "
    "list tree graph path node edge weight matrix vector scalar tensor batch layer head cache block engine server "
    "client worker train rollout sample greedy beam search score loss gradient clip ratio advantage baseline critic "
    "actor agent action reset done episode horizon discount entropy mean median variance noise signal filter window "
    "frame chunk stream event queue lock thread task pool memory weightless kernel driver device host trace timer "
    "clock span retry route proxy upstream header body status"
).split()
_FIRST_WORD = 3 + 256


def _spell() -> tuple[bytes, ...]:
    spelled = [s.encode() for s in SPECIALS] + [bytes([b]) for b in _BYTES]
    words = iter(dict.fromkeys(_WORDS))
    for token_id in range(_FIRST_WORD, 512):
        piece = _PIECES.get(token_id)
        spelled.append((piece if piece is not None else " " + next(words, f"w{token_id}")).encode())
    return tuple(spelled)


TOKENS = _spell()
_IDS = {spelling: token_id for token_id, spelling in enumerate(TOKENS)}
_LONGEST = max(map(len, TOKENS))
WORD_IDS = tuple(range(_FIRST_WORD, 512))
PARTIAL_IDS = tuple(i for i in range(3, _FIRST_WORD) if TOKENS[i] >= b"\x80")


def spelling(token_id: int) -> bytes:
    """The token's bytes; ids beyond the table (a larger vocab_size) are made-up words."""
    return TOKENS[token_id] if token_id < len(TOKENS) else f" w{token_id}".encode()


def token_text(token_id: int) -> str:
    """What the Python server calls a token by itself: nothing for bytes that are no character."""
    return spelling(token_id).decode("utf-8", "ignore")


def encode(text: str) -> list[int]:
    """Greedy longest match, so that every text has exactly one reading."""
    raw = text.encode("utf-8", "replace")
    ids, at = [], 0
    while at < len(raw):
        for length in range(min(_LONGEST, len(raw) - at), 0, -1):
            if (found := _IDS.get(raw[at : at + length])) is not None:
                ids.append(found)
                at += length
                break
    return ids


def decode(token_ids: Iterable[int], skip_special: bool = True) -> str:
    """The text of whole sequences, such as an echoed prompt."""
    kept = (spelling(i) for i in token_ids if not (skip_special and i < len(SPECIALS)))
    return b"".join(kept).decode("utf-8", "replace")


def render_chat(messages: list[tuple[str, str]], add_generation_prompt: bool = True) -> str:
    """The tiny model's chat template."""
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return turns + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class Detokenizer:
    """Text of one growing sequence: bytes that are no character yet are held back until the next token settles them."""

    __slots__ = ("_pending", "_skip_special")

    def __init__(self, skip_special: bool) -> None:
        self._pending = b""
        self._skip_special = skip_special

    def feed(self, token_id: int) -> tuple[str, str]:
        """The token's own string, and the text the sequence grows by."""
        raw = spelling(token_id)
        if token_id < len(SPECIALS):
            return raw.decode(), "" if self._skip_special else self._flush() + raw.decode()
        if raw < b"\x80":
            return raw.decode(), self._flush() + raw.decode()
        self._pending += raw
        try:
            character = self._pending.decode()
        except UnicodeDecodeError:
            return "", ""
        self._pending = b""
        return character, character

    def _flush(self) -> str:
        held, self._pending = self._pending, b""
        return held.decode("utf-8", "replace")
