"""What a fresh engine's rollouts differ by from the trainer: ``python cpu_mismatch.py MODEL PROMPTS.parquet``.

Prints the mean of |p(rollout) - p(trainer)| over sampled tokens, as verl's ``training/rollout_probs_diff_mean``;
the trainer's logits are bf16 and verl takes their logarithms in bf16, which is most of it in bf16 rollouts.
"""

import sys

import pandas
import torch
from transformers import AutoModelForCausalLM
from verl.utils.torch_functional import logprobs_from_logits
from vllm import LLM, SamplingParams


def main(path: str, data: str) -> None:
    engine = LLM(
        model=path,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=32,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        logprobs_mode="processed_logprobs",
    )
    words = engine.get_tokenizer()
    prompts = [
        words.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False)
        for prompt in pandas.read_parquet(data)["prompt"][:64]
    ]
    asked = SamplingParams(temperature=1.0, max_tokens=8, logprobs=0, n=4, seed=1)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    trainer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    gaps = []
    for prompt, answer in zip(prompts, answers, strict=True):
        for out in answer.outputs:
            tokens = list(out.token_ids)
            with torch.no_grad():
                logits = trainer(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            ours = logprobs_from_logits(logits, torch.tensor(tokens)).float()
            theirs = torch.tensor([chosen[token].logprob for chosen, token in zip(out.logprobs, tokens)])
            gaps += (ours.exp() - theirs.exp()).abs().tolist()
    print(f"mismatch={sum(gaps) / len(gaps)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
