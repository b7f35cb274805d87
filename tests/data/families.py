"""Chat templates in the manner of published families, shortened to what decides where a response stands.

``SPECIAL`` lists the special tokens that a template expects of its tokenizer.
"""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)

FAMILIES = {
    "chatml": CHATML,
    # A system message of its own where a conversation brings none.
    "smollm2": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
        + CHATML
    ),
    "zephyr": (
        "{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '<|user|>\n' + message['content'] + eos_token }}"
        "{% elif message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + eos_token }}"
        "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"
    ),
    "llama-2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
        "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
        + ALTERNATE
        + "{% if loop.index0 == 0 and system_message != false %}"
        "{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
        "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    # The date, and tool calls; a message with calls loses its text.
    "llama-3.2": (
        "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] | trim %}"
        "{% set messages = messages[1:] %}{% else %}{% set system_message = '' %}{% endif %}"
        "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' }}"
        "{{ system_message + '<|eot_id|>' }}{% for message in messages %}{% if 'tool_calls' in message %}"
        "{% set call = message.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
        "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}"
        "{% elif message.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
        "{{ message.content | tojson }}{{ '<|eot_id|>' }}{% else %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}"
        "{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}"
        + ALTERNATE
        + "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    # The system message stands before the last turn, and only where that is a user's.
    "mistral-v0.3": (
        "{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}"
        "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}{{ bos_token }}"
        "{% for message in loop_messages %}"
        + ALTERNATE
        + "{% if message['role'] == 'user' %}{% if loop.last and system_message is defined %}"
        "{{ '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}{% else %}"
        "{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}{% else %}"
        "{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    # The end of text stands behind a conversation that asks for no response.
    "phi-3": (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "phi-4-mini": (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message %}"
        "{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}"
        "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "qwen2.5": (
        "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0]['role'] == 'system' %}"
        "{{ messages[0]['content'] }}{% endif %}{{ '\n\n# Tools\n\n<tools>' }}{% for tool in tools %}{{ '\n' }}"
        "{{ tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}{% elif messages[0]['role'] == 'system' %}"
        "{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{% endif %}"
        "{% for message in messages %}{% if message.role == 'user' or (message.role == 'system' and not loop.first) or "
        "(message.role == 'assistant' and not message.tool_calls) %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant' }}"
        "{% if message.content %}{{ '\n' + message.content }}{% endif %}{% for call in message.tool_calls %}"
        '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
        "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
        "{% elif message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + message.content }}"
        "{{ '\n</tool_response><|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # The response to the last question has a thought, perhaps an empty one; earlier ones have none.
    "qwen3": (
        "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}"
        "{% if message.role == 'assistant' %}{% set content = message.content %}{% set thought = '' %}"
        "{% if '</think>' in content %}"
        "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if loop.index0 > ns.last %}"
        "{{ '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content + '<|im_end|>\n' }}"
        "{% else %}{{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{% endif %}"
        "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # Asks with an open thought, and cuts thoughts out of responses.
    "deepseek-r1": (
        "{% set ns = namespace(system='') %}{% for message in messages %}{% if message['role'] == 'system' %}"
        "{% set ns.system = message['content'] %}{% endif %}{% endfor %}{{ bos_token + ns.system }}"
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}"
        "{% elif message['role'] == 'assistant' and message['tool_calls'] %}"
        "{% for call in message['tool_calls'] %}"
        "{{ '<|Assistant|>' + call['type'] + '<|sep|>' + call['function']['name'] + '\n' }}"
        "{{ call['function']['arguments'] + eos_token }}{% endfor %}{% elif message['role'] == 'assistant' %}"
        "{{ '<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token }}"
        "{% elif message['role'] == 'tool' %}{{ '<|output|>' + message['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
    ),
    # Asks without a thought, by an empty one that responses do not have.
    "no-think": CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n\n</think>\n\n' }}{% endif %}"),
    # Knows no prompt for a generation.
    "header-only": CHATML.partition("{% if add_generation_prompt %}")[0],
    "vicuna": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
        "{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
        "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "command-r": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{% set name = 'SYSTEM' %}"
        "{% elif message['role'] == 'user' %}{% set name = 'USER' %}{% else %}{% set name = 'CHATBOT' %}{% endif %}"
        "{{ '<|START_OF_TURN|><|' + name + '|>' + message['content'] | trim + '<|END_OF_TURN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN|><|CHATBOT|>' }}{% endif %}"
    ),
}

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    *("<|User|>", "<|Assistant|>", "<|sep|>", "<|output|>", "<|START_OF_TURN|>", "<|END_OF_TURN|>"),
    *("<|SYSTEM|>", "<|USER|>", "<|CHATBOT|>"),
)
