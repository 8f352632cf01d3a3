"""What `flashpatch doctor` says of processors, by the flags that /proc/cpuinfo had on some."""

import pytest

from flashpatch.commands import surroundings

AVX2 = "fma avx f16c avx2 bmi2".split()
XEON = [*AVX2, "avx512f", "avx512_vnni"]
EPYC = [*XEON, "avx512_bf16"]
RAPIDS = [*EPYC, "avx512_fp16", "amx_bf16", "amx_tile", "amx_int8"]
WORDS = {
    "avx": ("no AVX2: ", "no AVX-512: ", "no AVX512-BF16: ", "no VNNI: ", "no AMX: "),
    "avx2": ("no AVX-512: ", "no AVX512-BF16: ", "no VNNI: ", "no AMX: "),
    "arrow": ("no AVX-512: ", "no AVX512-BF16: ", "no AMX: "),
    "xeon": ("no AVX512-BF16: ", "no AMX: "),
    "epyc": ("no AMX: ",),
    "rapids": ("AMX: ",),
    "arm": (),
}
FLAGS = dict(avx=["avx"], avx2=AVX2, arrow=[*AVX2, "avx_vnni"], xeon=XEON, epyc=EPYC, rapids=RAPIDS, arm=[])


@pytest.mark.parametrize("kind", WORDS)
def test_what_engines_cannot_do_there(kind: str) -> None:
    found = surroundings.processor(FLAGS[kind])
    assert len(found) == len(WORDS[kind]) and all(map(str.startswith, found, WORDS[kind])), found
    assert all("SIGILL" in one for one in found if one.startswith("AMX"))
