"""Name the family's options, and say when its patches are no longer needed."""

from __future__ import annotations

from flashpatch.record import Option

SGLANG = "sglang>=0.5.17"
UNTIL_VLLM = "vLLM hands out hidden states, chooses its number of speculative tokens by what they bring, and updates its drafter."
UNTIL_SGLANG = "SGLang hands out hidden states, chooses its configuration by what it brings per second, and updates its drafter by path."
UNTIL_VERL = "verl trains drafters between rollouts and brings them to its replicas."

OPTIONS = {
    "capture": Option(
        "auto",
        "under verl: train the drafter on states that the engine captures, or on those of the trainer's pass for old "
        "log-probabilities; auto: the trainer's, which cost decoding nothing, where there are any",
        choices=("auto", "engine", "trainer"),
    ),
    "capture_budget": Option(
        1 << 17,
        "stop capturing after this many tokens per policy version and engine, by default as many as fit into 1 GiB in bf16 with a "
        "hidden size of 4096; 0: no limit",
        kind=int,
        least=0,
    ),
    "capture_window": Option(
        512,
        "capture at most this many positions per request; of a longer one, a random window",
        kind=int,
        least=16,
    ),
    "samples": Option(
        "",
        "keep captured samples in this directory (mode 0700, at most 1024 samples and 1 GiB); empty: beside the ledger, as long as the engine lives",
    ),
    "adapt": Option(True, "let a bandit choose how many tokens to draft at each step", kind=bool),
    "arms": Option(
        [],
        "let the bandit choose among these, such as 3_1_4 (steps, top-k, tokens) or disable; empty: a few up to the most "
        "that the engine can run",
        kind=list,
    ),
    "guard": Option(
        2048, "never verify more draft tokens than this in one step, over the whole batch", kind=int, least=1
    ),
    "history": Option(
        False, "draft from the prompt and from earlier answers too; needs no drafter", kind=bool
    ),
    "history_tokens": Option(
        1 << 20,
        "remember so many tokens of earlier answers, the prompts asked last first; 0.4 KB of memory each, per engine",
        kind=int,
        least=1,
    ),
    "history_folder": Option(
        "",
        "with history on, keep earlier answers in this folder too, for a job that is resumed; not with tensor parallelism on SGLang; empty: in memory alone",
    ),
    "drafter": Option(
        "",
        "under verl: draft with the drafter in this folder; new or new-eagle3: make one, which co-training improves; "
        "empty: as verl's configuration says",
    ),
    "cotrain": Option(True, "under verl: train the drafter while replicas rest", kind=bool),
    "train_seconds": Option(
        60.0, "under verl: end a slice of the drafter's training after this long", kind=float, above=0
    ),
    "train_every": Option(
        1, "under verl: train the drafter in every N-th step of the policy", kind=int, least=1
    ),
    "trainer": Option(
        [], "settings of the drafter's training, such as rate=1e-3 or device=cuda:7", kind=list
    ),
}
