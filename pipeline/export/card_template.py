"""The text of the model cards, in Jinja; `card.py` fills it in. What is missing, at any depth, renders as nothing."""

HEADS = """\
---
{{ front_matter }}
---

# Medusa heads for {{ base or ("a tuned local model" if tuned else "a local model") }}

[Medusa](https://arxiv.org/abs/2401.10774) heads that make
{%+ if base %}[{{ base }}](https://huggingface.co/{{ base }}){% else %}a local model{% endif %}
 decode several tokens per forward
{%- if num_heads %}: {{ num_heads }} heads of {{ train.medusa.num_layers | default(1) }} residual block(s) each
{%- endif %}.
Head k (from 0) reads the target's last hidden state at position t and guesses the token at t+2+k. The target verifies
the guesses, so that greedy output stays its own.

{% if tuned %}
## The backbone has changed

These heads and their backbone were trained together (Medusa-2, section 2.2.2 of the paper), on text that
{{ original or "the original model" }} wrote. They belong to the tuned backbone
{%- if not base %}, exported beside them in `backbone/`{% endif %}, and not to the original.

{% include "drift" %}

{% endif %}
## Serve

With vLLM:

```bash
vllm serve {{ base or "BASE_MODEL" }} \\
  --speculative-config '{{ speculative_config }}'
```

{% if not base %}
`BASE_MODEL` stands for {{ "the tuned backbone" if tuned else "the model that these heads were trained on" }}.
{% endif %}
`num_speculative_tokens` may be anything from 1 to {{ num_heads or "the number of heads" }}.

{% if shared and train.medusa.num_layers != 1 %}
TGI cannot load these heads: it shares one lm_head among heads of one block only.
{% else %}
With TGI, which finds the base model in `config.json`:

```bash
text-generation-launcher --model-id {{ here }}
```
{% endif %}

{% if shared %}
TensorRT-LLM cannot load these heads: they store one lm_head for all, and it wants one each.
{% else %}
With TensorRT-LLM (Llama- and Qwen-shaped targets): `convert_checkpoint.py` of its Medusa example takes this directory
as `--medusa_model_dir`, with `--num_medusa_heads {{ num_heads or "K" }}` and a `--max_draft_len` of at least
{{ report.tree.nodes | number or "the tree's nodes" }}; the content of `{{ choices_file }}` goes to `--medusa_choices`.
{% endif %}

## Results

{% if not engines %}
These heads have not been checked yet.

{% else %}
|{% for name, _ in engines %} | {{ name }}{% endfor %} |
|---|{{ "---|" * engines | length }}
{% for label, key, spec in measures if engines | selectattr("1." ~ key) | list %}
| {{ label }}{% for _, engine in engines %} | {{ engine[key] | number(spec) or "-" }}{% endfor %} |
{% endfor %}
| greedy sequences identical{% for _, engine in engines %} | {{ engine.greedy_match | matched }}{% endfor %} |

{% if report.check.passed is false or report.check.failures %}
**The check failed.** {{ report.check.failures | join(" ") }}

{% endif %}
{% endif %}
## Accuracy of the heads

{% if not report.heads %}
Not measured yet.

{% else %}
How often the token is among a head's first guesses, on held-out rows (none of them was trained on).

| head | guesses |{% for top in tops %} {{ top | replace("top", "top-") }} |{% endfor %}

|---|---|{{ "---|" * tops | length }}
{% for head in report.heads %}
| {{ loop.index0 }} | t+{{ loop.index0 + 2 }} |
{%- for top in tops %} {{ head[top] | number(".1%") or "-" }} |{% endfor %}

{% endfor %}
{% endif %}

{% if report.tree.nodes %}
The tree of `{{ choices_file }}` was searched with these: {{ report.tree.nodes | number }} nodes, expected acceleration
rate {{ report.tree.expected_acceleration_rate | number(".2f") or "unknown" }}.

{% endif %}
{% if generate.mode or report.generate.rows or sources %}
## Data

{% endif %}
{% if generate.mode == "replay" %}
Self-distillation (section 2.3.2 of the paper): the user turns of the seed conversations were fed to the target one
after another, and the target wrote every answer itself.
{% elif generate.mode == "self-talk" %}
Self-distillation (section 2.3.2 of the paper): the target was given the first prompt of each seed conversation, and
wrote both sides from there.
{% elif generate.mode == "passthrough" %}
The seed conversations' own answers, not the target's: heads learn better from what the target would write.
{% endif %}
{% if generate.mode in ("replay", "self-talk") %}
Temperature {{ generate.temperature }}; held-out rows {{ generate.holdout_temperature }}.
{% endif %}
{% if report.generate.rows %}
{{ report.generate.rows | number }} conversations, {{ report.generate.tokens | number or "unknown" }} tokens.
{% endif %}
{% if sources %}
Seeds: {{ sources | join(", ") }}.
{% endif %}

{% if settings %}
## Recipe

| setting | value |
|---|---|
{% for name, value in settings %}
| {{ name }} | {{ value | words }} |
{% endfor %}

{% endif %}

## Limits

- The heads fit {{ "the tuned backbone alone" if tuned else "this very target and revision" }}.
  With a fine-tuned or otherwise quantized sibling they load, and accept less.
- The acceleration rate holds for text like the held-out rows; other subjects, languages and lengths accept less.
- The speedup holds for the hardware, engine and batch size that it was measured with; a server that is busy with large
  batches gains less, or loses.
- vLLM drafts the top-1 chain and never the tree, so that its acceleration rate is the lower one.
- Greedy output is the target's own but for ties within numerical noise, and rejection sampling keeps its distribution.
  Typical and nucleus acceptance alter it.
- No licence is declared for the heads; the target's own terms apply.
"""

BACKBONE = """\
---
{{ front_matter }}
---

# {{ original or "A local model" }}, tuned for Medusa heads

{% if original %}
[{{ original }}](https://huggingface.co/{{ original }})
{%- else %}
A local model
{%- endif %}
 after Medusa-2 training ([Medusa](https://arxiv.org/abs/2401.10774), section 2.2.2): LoRA on every linear layer,
trained together with heads that make it decode faster, on text that the model wrote itself, and merged into its
weights.
The heads are in [{{ heads }}](https://huggingface.co/{{ heads }}); tokenizer, chat template and generation settings are
the original's.

## How far it has moved

{% include "drift" %}

## Serve

Without the heads it is loaded like any other model. With them, in vLLM:

```bash
vllm serve {{ here }} \\
  --speculative-config '{{ speculative_config }}'
```

## Limits

- It is close to the original and not equal to it: where every answer must be the original's own, use heads that were
  trained on the frozen model (Medusa-1).
- How far it has moved was measured on text like the held-out rows; other subjects and languages may move more.
- No licence is declared for the changes; the original's own terms apply.
"""

DRIFT = """\
{% if drift %}
On held-out text that the original wrote:

| | |
|---|---|
{% for label, value in drift %}
| {{ label }} | {{ value }} |
{% endfor %}
{% else %}
How far it is from the original has not been measured.
{% endif %}
"""

TEMPLATES = {"heads": HEADS, "backbone": BACKBONE, "drift": DRIFT}
