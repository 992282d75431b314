"""Estimates beside the real sizes, by OpenAI's tokenizer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import tiktoken

import layout
from budgetguard_core.kit import estimate_tokens
from budgetguard_core.kit.projection import project

PROSE = """\
The harbour had been quiet since the morning ferry left. Two men were mending a net on the pier,
and a dog lay between them with its eyes half open. Nobody expected another boat before the
evening, so when the horn sounded from behind the headland, everyone on the waterfront looked up
at once. It was not a ferry. It was a small grey ship that none of them had seen before, and it
came in much faster than the rules of the harbour allowed. The older of the two men put down his
needle, wiped his hands, and said that there would be trouble. "Give it ten minutes," he said,
"and somebody will want to know why nobody was told." He was wrong about that, as it turned out,
but only by a quarter of an hour.
"""
CHINESE = """\
港口从早上渡轮离开以后就一直很安静。两个男人在码头上补渔网,一只狗躺在他们中间,眼睛半睁着。没有人想到傍晚之前还会有船来,
所以当汽笛声从海角后面传来的时候,所有人都抬起了头。那不是渡轮,而是一艘谁也没有见过的灰色小船,它进港的速度比规定的快得多。
年纪大的那个人放下手里的针,擦了擦手,说要出事了。
"""
JAPANESE = """\
朝のフェリーが出てから、港はずっと静かだった。二人の男が桟橋で網を直していて、その間に犬が目を半分開けたまま寝そべっていた。
夕方まで次の船が来るとは誰も思っていなかったので、岬の向こうから汽笛が聞こえたとき、みんなが一斉に顔を上げた。
"""
GERMAN = """\
Seit die Fähre am Morgen abgelegt hatte, war es im Hafen ruhig geblieben. Zwei Männer flickten auf
der Mole ein Netz, und zwischen ihnen lag ein Hund mit halb offenen Augen. Vor dem Abend erwartete
niemand ein weiteres Schiff, und als hinter der Landzunge das Horn ertönte, sahen alle zugleich
auf.
"""
RUSSIAN = """\
С тех пор как утром ушёл паром, в гавани было тихо. Двое мужчин чинили на причале сеть, а между ними
лежала собака с полуоткрытыми глазами. До вечера никто не ждал другого судна, поэтому, когда из-за
мыса раздался гудок, все разом подняли головы.
"""  # noqa: RUF001
ORDERS = [
    {
        "order_id": f"#W{5918442 + 7919 * number}",
        "status": "delivered" if number % 3 else "pending",
        "placed_at": f"2024-05-{number + 10}T1{number % 10}:32:08Z",
        "items": [
            {"name": "Mechanical Keyboard", "item_id": f"{9690244451 + number}", "price": 236.51},
            {"name": "Desk Lamp", "options": {"color": "black", "power": "USB"}, "price": 137.44},
        ],
        "address": {"street": f"{number + 100} Maple Drive", "city": "Denver", "zip": "80280"},
    }
    for number in range(8)
]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "exchange_delivered_order_items",
        "description": "Exchange items of a delivered order for new ones of the same product.",
        "parameters": {
            "type": "object",
            "properties": {
                "order_id": {"type": "string", "description": "The id, such as '#W0000000'."},
                "item_ids": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["order_id", "item_ids"],
        },
    },
}


def source(name):
    return Path(layout.ROOT, name).read_text()


TEXTS = {
    "prose": PROSE,
    "markdown": source("README.md"),
    "code": source("budgetguard_core/loops.py"),
    "configuration": source("pyproject.toml"),
    "JSON": json.dumps(ORDERS),
    "indented JSON": json.dumps(ORDERS, indent=2),
    "arguments": "".join(json.dumps({"order_id": one["order_id"]}) for one in ORDERS),
    "schema": json.dumps(SCHEMA),
    "Chinese": CHINESE,
    "Japanese": JAPANESE,
    "German": GERMAN,
    "Russian": RUSSIAN,
}


@pytest.fixture(scope="module")
def encoding():
    """The encoding of GPT-4o and its successors, from the copy that litellm ships."""
    litellm = importlib.util.find_spec("litellm")
    assert litellm is not None
    assert litellm.submodule_search_locations is not None
    shipped = Path(litellm.submodule_search_locations[0], "litellm_core_utils", "tokenizers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(shipped))
        return tiktoken.get_encoding("o200k_base")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_is_estimated_within_thirty_percent(encoding, text):
    real = len(encoding.encode(text, disallowed_special=()))

    assert 0.95 <= estimate_tokens(text) / real <= 1.3


def test_a_chat_is_projected_within_thirty_percent(encoding):
    """Prose and JSON; what the provider puts around a message is as OpenAI's cookbook has it."""
    arguments = json.dumps({"order_id": "#W5918442", "item_ids": ["9690244451"]})
    call = {"name": "exchange_delivered_order_items", "arguments": arguments}
    messages = [
        {"role": "system", "content": PROSE},
        {"role": "user", "content": "Where is my keyboard? I ordered it on Tuesday."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_oIHazX6yQrB8hUwl4", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_oIHazX6yQrB8hUwl4", "content": json.dumps(ORDERS)},
        {"role": "assistant", "content": "It was delivered on Friday. Can I help you with it?"},
        {"role": "user", "content": "No."},
    ] * 3
    sent = [message["role"] for message in messages]
    sent += [message["content"] for message in messages if message["content"]]
    sent += [*call.values()] * 3
    real = 3 * len(messages) + 3 + sum(len(encoding.encode(part)) for part in sent)

    assert 1 <= project(messages) / real <= 1.3


def test_many_short_messages_are_projected_within_thirty_percent(encoding):
    messages = [{"role": "user", "content": f"Step {number}: go on."} for number in range(200)]
    real = 3 + sum(4 + len(encoding.encode(message["content"])) for message in messages)

    assert 0.9 <= project(messages) / real <= 1.3
