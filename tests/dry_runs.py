"""What a dry run of a published table needs: tiny random models of the published families, and data as distributed.

The chat templates are those of the published models, as far as they are short enough to stand here.
"""

import csv
import itertools
import json
import random
from pathlib import Path

import torch
import transformers as tf

import headwater as hw
from tests.tiny import WORDS, tiny_model, tiny_tokenizer

LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% for message in messages if message['role'] != 'system' %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + ('<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.first and system else '') + "
    "message['content'] | trim + ' [/INST]' }}{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
QWEN_3 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
FAMILIES = {
    "gpt2": "gpt2",
    "pythia": "neox",
    "phi": "phi",
    "mamba": "mamba",
    "Mistral": "mistral",
    "Qwen3": "qwen3",
    "lama": "llama",
}
CONTEXT = 4096
ENDING = 4
"""How much larger than another's the logit of the end token is."""
NAMES = [" ".join(words) for words in itertools.permutations(WORDS[:8], 3)][::3]


def family_of(model: str) -> str:
    """The family of a published model, by its name."""
    return next(family for part, family in FAMILIES.items() if part in model)


def template_of(model: str) -> str | None:
    """The chat template of a published model; None of a base model."""
    if "Qwen3" in model:
        return QWEN_3
    if "chat" in model:
        return LLAMA_2
    return (MISTRAL if "Mistral" in model else LLAMA_3) if "Instruct" in model else None


def random_checkpoint(folder: Path, model: str) -> Path:
    """Write a tiny random model of a published one's family, which writes words and comes to an end."""
    network, tokenizer = _network(model), tiny_tokenizer()
    tokenizer.chat_template = template_of(model)
    if family_of(model) == "gpt2":
        network.config.n_positions = CONTEXT
        network.transformer.wpe = torch.nn.Embedding(CONTEXT, network.config.n_embd)
    else:
        network.config.max_position_embeddings = CONTEXT
    tokenizer.model_max_length = CONTEXT
    head, end = network.get_output_embeddings().weight, tokenizer.eos_token_id
    words = [tokenizer.convert_tokens_to_ids("Ġ" + word) for word in WORDS]
    with torch.no_grad():
        kept = torch.zeros(len(head), dtype=torch.bool)
        kept[[*words, end]] = True
        head[~kept] *= 0.05
        head[end] *= ENDING
    target = folder / model.rpartition("/")[2]
    network.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def _network(model: str) -> tf.PreTrainedModel:
    """A tiny random network of a published model's family."""
    if family_of(model) != "mamba":
        return tiny_model(family_of(model))
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, "bos_token_id": 0, "eos_token_id": 0}
    return tf.MambaForCausalLM(tf.MambaConfig(vocab_size=len(tiny_tokenizer()), pad_token_id=1, **sizes))


def relation_folder(folder: Path, names: list[str]) -> Path:
    """Write random relations under published names, in the published layout."""
    for name in names:
        (folder / name).mkdir(parents=True)
        pairs = random.sample(list(itertools.permutations(WORDS, 2)), 40)
        (folder / name / f"{name}.json").write_text(json.dumps(pairs))
    return folder


def question_files(folder: Path, accepted: dict[str, str]) -> None:
    """Write the four question sets as they are distributed; `accepted` has the right answers that are known."""

    def right(question: str) -> list[str]:
        return [accepted.get(question, "nothing of this")]

    with (folder / "popqa.tsv").open("w", newline="") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerow(["id", "subj", "prop", "obj", "s_pop", "o_pop", "question", "possible_answers"])
        for number, name in enumerate(NAMES):
            question = f"What is the capital of {name}?"
            rows.writerow([number, name, "capital", "x", 10 + number, 20, question, json.dumps(right(question))])
    trivia = [f"In which city did {name} see the big dog?" for name in NAMES]
    data = [
        {"Question": q, "QuestionId": f"tc_{i}", "Answer": {"Value": right(q)[0], "Aliases": right(q)}}
        for i, q in enumerate(trivia)
    ]
    (folder / "triviaqa.json").write_text(json.dumps({"Data": data, "Domain": "unfiltered-web", "Split": "dev"}))
    hotpot = [f"Which city is bigger than {name}?" for name in NAMES]
    rows = [{"_id": str(i), "question": q, "answer": right(q)[0], "type": "bridge"} for i, q in enumerate(hotpot)]
    (folder / "hotpotqa.json").write_text(json.dumps(rows))
    natural = [f"who is the capital of {name} in the small one" for name in NAMES]
    lines = [json.dumps({"question": q, "answer": right(q)}) for q in natural]
    (folder / "nq_open.jsonl").write_text("\n".join(lines) + "\n")


def answerable_files(folder: Path, checkpoint: Path) -> None:
    """Write the four question sets so that a random model answers about half of the questions rightly."""
    question_files(folder, {})
    model, known = hw.load(checkpoint), {}
    for name in ("popqa.tsv", "triviaqa.json", "hotpotqa.json", "nq_open.jsonl"):
        table = hw.answer(model, hw.load_questions(folder / name), extractor="rules", progress=False).table
        for question, answer in list(zip(table["question"], table["answer"], strict=True))[::2]:
            known[question] = answer
    question_files(folder, known)


def depth_folder(folder: Path) -> Path:
    """Write questions of three depths in the layout of DepthQA."""
    folder.mkdir()
    questions, nodes, names = [], [], []
    for group in range(4):
        for depth, count in ((1, 4), (2, 2), (3, 1)):
            for number in range(count):
                node = f"{group}_d3" if depth == 3 else f"{group}_d{depth}_n{number}"
                below = [f"{group}_d{depth - 1}_n{i}" for i in ((2 * number, 2 * number + 1) if depth == 2 else (0, 1))]
                above = f"{group}_d3" if depth == 2 else f"{group}_d2_n{number // 2}"
                text = f"What is the capital of {NAMES[group * 7 + depth + number]} ?"
                qid = f"d{depth}_q{group}_{number}"
                questions.append({"qid": qid, "depth": depth, "question": text, "answer": "Rome is the big one"})
                edges = {"direct_predecessors": below * (depth > 1), "direct_successors": [above] * (depth < 3)}
                nodes.append({"nodeid": node, "group": group, "depth": depth, **edges})
                names.append({"nodeid": node, "qid": qid})
    for name, rows in (("questions", questions), ("nodes", nodes), ("node_to_q", names)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def member_file(file: Path) -> Path:
    """Write texts as WikiMIA has them, or put together."""
    file.parent.mkdir(exist_ok=True)
    if "concat" in file.name:
        joined = [{"input": " ".join(random.choices(WORDS, k=64)), "label": [0, 1]} for _ in range(20)]
        file.write_text("".join(json.dumps(row) + "\n" for row in joined))
        return file
    rows = [{"input": " ".join(random.choices(WORDS, k=12)), "label": number % 2} for number in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
