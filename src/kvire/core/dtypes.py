"""The dtypes that a pool keeps KV in, one record each: adding one is adding a record.

Kernels that know a dtype read it natively; every other takes the portable attention path.
"""

from dataclasses import dataclass

SCALE_BYTES = 4  # a float32 per token, layer and KV head, for K and for V


@dataclass(frozen=True, slots=True)
class KVDType:
    """A dtype of KV.

    name: in options and namespaces, and torch's own name.
    element_bytes: of one number.
    is_scaled: each row of a head has a float32 scale behind it.
    has_exponents: numbers are floats, whose exponents compress.
    computes: models can run in it.
    kernel_code: its number in the native kernels; None if they do not support it.
    note: for help texts.
    """

    name: str
    element_bytes: int
    is_scaled: bool = False
    has_exponents: bool = True
    computes: bool = False
    kernel_code: int | None = None
    note: str = ""

    def rows_bytes(self, numbers: int) -> int:
        """Bytes of a count of numbers, up to where their scales begin.

        Scales are aligned to their own size.
        """
        size = numbers * self.element_bytes
        return -(-size // SCALE_BYTES) * SCALE_BYTES if self.is_scaled else size

    def scales_bytes(self, rows: int) -> int:
        """Bytes of the scales of a count of rows; 0 for dtypes without."""
        return rows * SCALE_BYTES if self.is_scaled else 0


_RECORDS = (
    KVDType("float32", 4, computes=True, kernel_code=0),
    KVDType("float16", 2, computes=True, kernel_code=1, note="half the bytes"),
    KVDType("bfloat16", 2, computes=True, kernel_code=2, note="half the bytes"),
    KVDType("int8", 1, is_scaled=True, has_exponents=False, kernel_code=3, note="about a quarter"),
)
KV_DTYPES = {record.name: record for record in _RECORDS}


def compute_dtypes() -> dict[str, KVDType]:
    """Dtypes that models can run in."""
    return {name: record for name, record in KV_DTYPES.items() if record.computes}


def names() -> str:
    """All dtypes, for people: float32, float16 (half the bytes), ..."""
    return ", ".join(f"{record.name} ({record.note})" if record.note else record.name for record in _RECORDS)


def smaller_than(name: str) -> list[str]:
    """Names of dtypes that take fewer bytes, largest first."""
    return [record.name for record in _RECORDS if record.element_bytes < KV_DTYPES[name].element_bytes]
