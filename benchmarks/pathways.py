"""Suite `pathways`: what a pathway run of Llama-3.1-8B's shape takes, beside what docs/scaling.md computes for it.

Question: is the arithmetic of docs/scaling.md right, by which large runs are planned?

The model has random weights and the embedded model's tokenizer, its questions are the embedded model's with that
model's answers: what is read and how often is as in a run, whatever the numbers say. On a GPU the shape is
Llama-3.1-8B's in bfloat16; elsewhere eight layers of width 512. Two rows: new tokens of batches of 64 prompts; and
`hw.trace_pathways` with all controls.

Both are measured on a sample and taken to 4 sets of 2,000 questions by the arithmetic itself: seconds of the sample
times what it computes for all, over what it computes for the sample. So the ratio is that of the sample. The rates are
those measured here. Of a GPU's, passes are taken to reach 40 and 60 % as in docs/scaling.md, and its host works beside
it; of a CPU's they are taken to reach all, and the host, which is the device too, adds its time.
"""

import dataclasses
from collections.abc import Iterator

import torch
import transformers
from tools import scaling as arithmetic

import headwater as hw
from benchmarks.hardware import REACHED, SIZES, STREAMED, Sizes
from benchmarks.machine import Machine, Work, on_gpu, seconds
from benchmarks.report import Row
from headwater.models.generation import generate_tokens
from headwater.models.hooked import HookedModel
from headwater.questions.answers import AnsweredQuestions

LLAMA_8B = SIZES[arithmetic.LLAMA_8B]
SMALL = Sizes(layers=8, d_model=512, heads=8, kv_heads=2, d_head=64, d_mlp=1792, d_vocab=32_000)
SAMPLE = 64
"""Questions of each set."""


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The counts of docs/scaling.md with the rates of a machine."""

    machine: Machine
    sizes: Sizes
    gpu: bool

    @property
    def weights(self) -> int:
        """Bytes: bfloat16 on a GPU, else float32."""
        return self.sizes.weights * (1 if self.gpu else 2)

    def a_pass(self, tokens: float, host: float) -> float:
        """Seconds of a pass of so many tokens, given the host's for a layer."""
        operations, asked = self.sizes.operations * tokens, self.sizes.layers * host
        if not self.gpu:
            return self.machine.floor(operations, self.weights) + asked
        rate = (self.machine.half_rate or self.machine.matrix_rate) * REACHED
        return max(operations / rate, self.weights / (self.machine.bandwidth * STREAMED), asked)

    def answers(self, examples: int, prompt: int = arithmetic.PROMPT) -> float:
        """Seconds of new tokens after prompts."""
        rows = min(arithmetic.BATCH, examples)
        first = self.a_pass(rows * prompt, arithmetic.HOST)
        return examples / rows * (first + (arithmetic.NEW - 1) * self.a_pass(rows, arithmetic.HOST_STEP))

    def traced(self, examples: int, read: float = arithmetic.READ, forwards: float = arithmetic.FORWARDS) -> float:
        """Seconds of pathways, so many tokens of each answer read so often, and of their probes."""
        rows = min(arithmetic.BATCH, examples // arithmetic.SETS)
        passes = examples / rows * forwards * self.a_pass(rows * read, arithmetic.HOST)
        return passes + arithmetic.probe_seconds(self.sizes, 1, examples)


def run(machine: Machine, device: str, sizes: Sizes | None = None, sample: int = SAMPLE) -> Iterator[Row]:
    """Yield the row of answers, then that of pathways."""
    sizes = sizes or (LLAMA_8B if on_gpu(device) else SMALL)
    model, answered = task(device, sizes, sample)
    counted = Arithmetic(machine, sizes, on_gpu(device))
    yield _answers(counted, device, model)
    yield _pathways(counted, device, model, answered)


def task(device: str, sizes: Sizes, sample: int) -> tuple[HookedModel, AnsweredQuestions]:
    """Return the random model, and questions of every set with the embedded model's answers as if they were its own."""
    embedded = hw.load(device=device)
    answered = hw.answer(embedded, hw.load_questions(sample=sample, seed=0), progress=False)
    config = transformers.LlamaConfig(
        vocab_size=sizes.d_vocab,
        hidden_size=sizes.d_model,
        intermediate_size=sizes.d_mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.d_head,
        tie_word_embeddings=sizes.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu(device) else torch.float32
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model = hw.load(plain, device=device)
    model.tokenizer = embedded.tokenizer
    own = {"model": model.name, "fingerprint": model.fingerprint, "tokenizer": model.tokenizer_digest}
    return model, dataclasses.replace(answered, run=dataclasses.replace(answered.run, **own))


def _answers(counted: Arithmetic, device: str, model: HookedModel) -> Row:
    rows, prompt, examples = arithmetic.BATCH, arithmetic.PROMPT, arithmetic.EXAMPLES
    size = (rows, prompt)
    batch = model.tokenize(torch.randint(2, 1000, size, generator=torch.Generator().manual_seed(0)))
    taken = [seconds(lambda: generate_tokens(model, batch, max_new_tokens=arithmetic.NEW), device) for _ in range(2)]
    computed = counted.answers(examples)
    operations = counted.sizes.operations * examples * (prompt + arithmetic.NEW - 1)
    moved = counted.weights * examples / rows * arithmetic.NEW
    work = Work(operations, moved, done=examples * arithmetic.NEW, unit="tokens", half=counted.gpu)
    return _row(counted, f"{arithmetic.NEW} new tokens of {examples:,} answers", work, computed, min(taken),
                counted.answers(rows), f"{rows} answers")  # fmt: skip


def _pathways(counted: Arithmetic, device: str, model: HookedModel, answered: AnsweredQuestions) -> Row:
    table, examples = answered.table, arithmetic.EXAMPLES
    read = table["tokens"].map(len).groupby(table["dataset"]).max().mean()  # as long as the longest of a batch
    of_answer = 1 - float((table["answer_start"] / table["tokens"].map(len)).mean())
    forwards = arithmetic.forwards(float((table["z"] == 0).mean()), of_answer)
    taken = seconds(lambda: hw.trace_pathways(model, answered, progress=False), device)
    tokens = examples * arithmetic.FORWARDS * arithmetic.READ
    moved = counted.weights * examples / arithmetic.BATCH * arithmetic.FORWARDS
    work = Work(counted.sizes.operations * tokens, moved, done=examples, unit="examples", half=counted.gpu)
    return _row(counted, f"pathways of {examples:,} answers, controls included", work, counted.traced(examples), taken,
                counted.traced(len(table), read, forwards), f"{len(table)} answers of {read:.0f} tokens")  # fmt: skip


def _row(
    counted: Arithmetic, what: str, work: Work, computed: float, taken: float, computed_of_it: float, sample: str
) -> Row:
    sizes = counted.sizes
    return Row(
        name=f"pathways: {what}, {sizes.layers} layers of width {sizes.d_model}",
        peer="the arithmetic of docs/scaling.md, with the rates measured here",
        floor_s=counted.machine.floor_of(work),
        work=work,
        peer_s=computed,
        headwater_s=taken * computed / computed_of_it,
        agrees=None,
        peak_bytes=None,
        target="0.67 to 1.5 x",
        note=f"random weights; measured on {sample}: {taken:.3g} s, computed for these {computed_of_it:.3g} s",
    )
