"""The family's chat template (ChatML with tools and thinking), for tokenizers whose own template knows no tools.

`data.chat_template=chatml` selects it. Thinking is rendered after the last real user query only, and everywhere with
keep_all_think. Results that follow one another share one user turn.
"""

TEMPLATE = """\
{%- macro think(message) -%}
    {%- if message.reasoning_content -%}
        {{- message.reasoning_content.strip('\\n') -}}
    {%- elif '</think>' in message.content -%}
        {{- message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -}}
    {%- endif -%}
{%- endmacro -%}
{%- set last = namespace(query=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') -%}
        {%- set last.query = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- set first = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if first or tools -%}
    {{- '<|im_start|>system\\n' + first -}}
    {%- if tools -%}
        {{- ('\\n\\n' if first else '') + '# Tools\\n\\nFunctions that can be called:\\n<tools>' -}}
        {%- for tool in tools -%}
            {{- '\\n' + tool | tojson -}}
        {%- endfor -%}
        {{- '\\n</tools>\\n\\nA call is written as:\\n<tool_call>\\n' -}}
        {{- '{"name": <function>, "arguments": <object>}\\n</tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- set thought = think(message) -%}
        {%- set answer = message.content -%}
        {%- if not message.reasoning_content and '</think>' in answer -%}
            {%- set answer = answer.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if thought and (keep_all_think or loop.index0 > last.query) -%}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- answer -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '\\n' if answer or not loop.first else '' -}}
            {{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' -}}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' else '' -}}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' -}}
    {%- elif message.role != 'system' or not loop.first -%}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
