"""The prompt a chat becomes, against transformers', which trained the models on it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from serving import CHATML, train_byte_level

from tandem_runtime.server.tokenizer import ChatTemplate, TemplateError, Tokenizer, TokenizerError

if TYPE_CHECKING:
    from pathlib import Path

CHAT = [
    {"role": "system", "content": "Be brief <&>."},
    {"role": "user", "content": "  What is 2 + 2?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Und 'ä' 世界?"},
]

TEMPLATES = {
    "chatml": CHATML,
    "blocks whose whitespace is trimmed": """
        {%- for message in messages %}
            {% if message.role == 'system' %}
                {{ '<<SYS>>' + message.content + '<</SYS>>' }}
            {% elif loop.first %}
                first
            {% else %}
                {{- message.content | trim }}
            {% endif %}
        {%- endfor %}
        {% if add_generation_prompt %}
assistant:{% endif %}""",
    "special tokens and unset tools": "{{ bos_token }}{% if tools %}tools{% endif %}{{ 1 }}{{ eos_token }}",
    "JSON that is not made safe for HTML": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "a break": (
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "training marks": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "a namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    ),
    "the client's own switch": "{{ 'think' if enable_thinking else 'plain' }}{{ messages | length }}",
}


def write(directory: Path, config: dict[str, Any], template: str | None = None) -> Path:
    train_byte_level().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_reads_as_in_transformers(tmp_path: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    write(tmp_path, {**special, "chat_template": TEMPLATES[name]})
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=TEMPLATES[name], **special
    )
    text = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert Tokenizer.load(tmp_path).render_chat(CHAT, {"enable_thinking": True}) == text


def test_special_tokens_written_as_objects_are_read(tmp_path: Path) -> None:
    write(tmp_path, {"bos_token": {"content": "<B>", "lstrip": False}, "chat_template": "{{ bos_token }}"})
    assert Tokenizer.load(tmp_path).render_chat(CHAT, {}) == "<B>"


def test_the_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": "old"}, "new")
    assert Tokenizer.load(tmp_path).render_chat(CHAT, {}) == "new"


def test_of_several_named_templates_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(tmp_path, {"chat_template": named})
    assert Tokenizer.load(tmp_path).render_chat(CHAT, {}) == "plain"


def test_a_template_refuses_messages_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('Conversation roles must alternate') }}", {})
    with pytest.raises(TemplateError, match="Conversation roles must alternate"):
        template.render(CHAT, {})


@pytest.mark.parametrize("source", ["{{ messages[9].content }}", "{{ messages + 1 }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_on_the_messages_is_a_refusal(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template refused the messages"):
        ChatTemplate(source, {}).render(CHAT, {})


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    for source in ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"]:
        with pytest.raises(TemplateError, match=r"unsafe|undefined"):
            ChatTemplate(source, {}).render(list(CHAT), {})


def test_a_clients_switches_cannot_replace_the_messages() -> None:
    assert ChatTemplate("{{ messages | length }}", {}).render(CHAT, {"messages": []}) == "4"


def test_strftime_now_is_todays_date() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y-%m') }}", {}).render(CHAT, {})
    assert len(rendered) == 7
    assert rendered[4] == "-"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        Tokenizer.load(write(tmp_path, {})).render_chat(CHAT, {})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json: not found"),
        ({"tokenizer.json": "{"}, "tokenizer.json: "),
        (
            {"tokenizer.json": None, "tokenizer_config.json": "[]"},
            "tokenizer_config.json: must be a JSON object",
        ),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "tokenizer_config.json: "),
        (
            {"tokenizer.json": None, "chat_template.jinja": "{% if %}"},
            "chat_template.jinja: the chat template does not compile",
        ),
        (
            {"tokenizer.json": None, "tokenizer_config.json": '{"chat_template": "{{ messages | nosuch }}"}'},
            "No filter named 'nosuch'",
        ),
    ],
)
def test_a_directory_that_cannot_be_read_names_the_file(
    tmp_path: Path, files: dict[str, str | None], message: str
) -> None:
    for name, content in files.items():
        if content is None:
            train_byte_level().save(str(tmp_path / name))
        else:
            (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError) as error:
        Tokenizer.load(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
