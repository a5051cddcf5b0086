"""Write chat_renderings.json: what transformers makes of some chat templates.

    python tests/data/make_chat_reference.py        (in an environment with transformers and jinja2)

Two kinds: small templates, each of which holds what real ones have been seen to do, and templates/*.jinja, in the form that the models of that family bring
along (tool descriptions shortened), over whole conversations; where one refuses a conversation, its words are kept. The small ones are ours, except the first (SmolLM2-135M-Instruct's, Apache-2.0). Nothing of kestrel is used.
"""
from __future__ import annotations

import json
from pathlib import Path

import jinja2
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).resolve().parent

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LOOPS = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'ignored' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {{ '[' ~ loop.index0 ~ '] ' + message.role | upper }}: {{ message.content | trim }}
{%- endfor %}
{% if add_generation_prompt %}
  ASSISTANT:
{% endif %}
"""

BLOCKS = """  {# a comment #}
  {% set ns = namespace(count=0, seen='') %}
{% for message in messages %}
  {% if message['role'] == 'user' %}
    {% set ns.count = ns.count + 1 %}
  {% endif %}
    line {{ ns.count }}: {{ message['content'] }}
{% endfor %}

  {% macro wrap(text) %}<<{{ text }}>>{% endmacro %}
{{ wrap(messages[-1]['content']) }}{{ eos_token }}
{% if not add_generation_prompt is defined %}undefined{% endif %}
{{ undefined_name }}|{{ tools }}|{{ (documents is none) }}
"""

JSON = """{%- for message in messages %}
{{ message | tojson }}
{{ message.content | tojson(indent=2) }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson(separators=(',', ':'), sort_keys=true) }}{% endif %}
{%- endfor %}
{%- if tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
"""

DATE = """{{ strftime_now('%% 100%%') }}|{{ strftime_now('%Y') | length }}|{% for m in messages %}{{ m.content }}{% endfor %}"""

GENERATION = """{% for message in messages %}
{% if message.role == 'assistant' %}
A: {% generation %}{% set inner = 1 %}{{ message.content }}{{ eos_token }}{% endgeneration %}{{ inner }}
{% else %}
Q: {{ message.content.split('</think>')[-1].lstrip('\\n') }}
{% endif %}
{% endfor %}
"""

USER = {"role": "user", "content": "  Grüße, 世界 😀 <b>\"quoted\" & 'single'</b>\n\n"}
CONVERSATION = [{"role": "system", "content": "Be brief."}, USER, {"role": "ignored", "content": "x"},
                {"role": "assistant", "content": "<think>well</think>\n\nHi.", "tool_calls": [{"b": 1, "a": "é"}]},
                {"role": "user", "content": "<think>mine</think>\nAnd <|im_end|>?"}, {"role": "stop", "content": "y"},
                {"role": "user", "content": "unseen"}]
TOOLS = [{"type": "function", "function": {"name": "température", "parameters": {"type": "object", "required": []}}}]
SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>"}

SYSTEM, HELLO, HI = {"role": "system", "content": "Be brief. "}, {"role": "user", "content": " Grüße, 世界 😀 <|im_end|>\n"}, {"role": "assistant", "content": "Hi there.\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 4."}
CONVERSATIONS = {
    "user": [HELLO], "system": [SYSTEM, HELLO], "turns": [HELLO, HI, {"role": "user", "content": "And <b>\"2 + 2\"</b>?"}],
    "system turns": [SYSTEM, HELLO, HI, {"role": "user", "content": "x"}, HI], "thinking": [HELLO, THOUGHT, {"role": "user", "content": "Why?"}, THOUGHT],
    "tools": [SYSTEM, HELLO], "assistant first": [HI, HELLO], "two users": [HELLO, HELLO], "late system": [HELLO, HI, SYSTEM],
}


def main() -> None:
    cases = []
    for name, template in [("smollm2", SMOLLM2), ("loops", LOOPS), ("blocks", BLOCKS), ("json", JSON), ("date", DATE),
                           ("generation", GENERATION)]:
        for messages in (CONVERSATION, CONVERSATION[1:2]):
            for prompt in (True, False):
                variables = dict(SPECIAL, tools=TOOLS) if name == "json" else SPECIAL
                (text,), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt,
                                                   **variables)
                cases.append({"name": name, "template": template, "messages": messages,
                              "add_generation_prompt": prompt, "variables": variables, "rendered": text})
    templates = {path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "templates").glob("*.jinja"))}
    families = []
    for name, template in templates.items():
        for kind, messages in CONVERSATIONS.items():
            variables = dict(SPECIAL, date_string="26 Jul 2024", **({"tools": TOOLS} if kind == "tools" else {}), **({"enable_thinking": False} if kind == "thinking" else {}))
            for prompt in (True, False):
                case = {"name": name, "kind": kind, "add_generation_prompt": prompt, "variables": variables}
                try:
                    (case["rendered"],), _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt, **variables)
                except jinja2.exceptions.TemplateError as error:
                    case["refused"] = str(error)
                families.append(case)
    reference = {"provenance": {"script": "tests/data/make_chat_reference.py", "transformers": transformers.__version__,
                                "jinja2": jinja2.__version__}, "cases": cases, "conversations": CONVERSATIONS, "families": families}
    (HERE / "chat_renderings.json").write_text(json.dumps(reference, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
