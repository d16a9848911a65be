"""The three scheduling policies as three switches, so that the paper's comparison runs on one scheduler.

Knows only what the switches mean; `scheduler.py` acts on them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """How requests are admitted, how prompts are read, and when finished requests leave."""

    name: str
    reserve_output: bool  # admission takes blocks for prompt + max_tokens; else on demand, with preemption
    whole_prompts: bool  # a prompt is one row, whatever its length; else it is cut under the token budget
    closed_batches: bool  # nobody joins until all are done, and the finished stay as padding

    @property
    def preempts(self) -> bool:
        """Whether running requests may lose their blocks: what is reserved is kept."""
        return not self.reserve_output

    def max_step(self, max_batch_tokens: int, max_draft: int) -> int:
        """Tokens that a request computes in one iteration at most, prompts that are read whole left out."""
        return 1 + max_draft if self.whole_prompts else max_batch_tokens


POLICIES = {
    policy.name: policy
    for policy in (
        # Request-level batching: FasterTransformer under Triton or TF Serving, the paper's baseline.
        Policy("static", reserve_output=True, whole_prompts=True, closed_batches=True),
        # Algorithm 1 of "Orca: A Distributed Serving System for Transformer-Based Generative Models" (OSDI 2022).
        Policy("orca", reserve_output=True, whole_prompts=True, closed_batches=False),
        # Blocks on demand (PagedAttention) and chunked prefill (Sarathi-Serve) on Orca's iterations.
        Policy("paged", reserve_output=False, whole_prompts=False, closed_batches=False),
    )
}
