"""The routes of ``dma-hf serve``: what they answer and refuse, and the format of answers."""

from __future__ import annotations

import asyncio
import json
import threading
from urllib.error import HTTPError

import openai
import pytest
from dma_eval.load.models import load_model
from serve_requests import (
    CHAT,
    NEW_TOKENS,
    TEMPLATE,
    TIMEOUT,
    Scripted,
    answer_to,
    listening,
    serving,
    status_of,
    text_of,
)
from served import DEMO_MODEL

from dma_hf.serving import Sequential, make_app


@pytest.fixture(scope="module")
def client(arguments):
    """Of a server that answers from a packed cache."""
    with serving(*arguments("+int4")) as client:
        yield client


@pytest.fixture
def asked(question):
    """The body of a request for the words in ``expected``, for each route."""
    common = {"max_tokens": NEW_TOKENS, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": question}]}
    return {"/v1/chat/completions": chat | common, "/v1/completions": {"prompt": question} | common}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_is_that_of_the_backend_and_its_cache(client, expected, asked, path):
    """Also in pieces, with the usage if it is asked for: once, or so far in every piece."""
    body, options = asked[path], {"include_usage": True}
    whole = client.post(path, **body)
    assert text_of(whole) == expected["+int4"]
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", NEW_TOKENS)
    plain = client.stream(path, **body)
    assert sum(bool(text_of(event)) for event in plain) > NEW_TOKENS / 2
    assert "".join(map(text_of, plain)) == expected["+int4"]
    assert not any("usage" in event for event in plain)
    reasons = [None] * (len(plain) - 1) + ["length"]
    assert [event["choices"][0]["finish_reason"] for event in plain] == reasons
    *events, last = client.stream(path, **body, stream_options=options)
    assert [event["usage"] for event in events] == [None] * len(plain)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    *events, _ = client.stream(path, **body, stream_options=options | {"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert (counts, counts[-1]) == (sorted(counts), NEW_TOKENS)


def test_a_stop_string_ends_an_answer(client, expected, asked):
    path, body = "/v1/chat/completions", asked["/v1/chat/completions"]
    stop = expected["+int4"].split()[3]
    upto = expected["+int4"].partition(stop)[0]
    assert upto
    whole = client.post(path, **body, stop=[stop])
    assert (text_of(whole), whole["choices"][0]["finish_reason"]) == (upto, "stop")
    assert "".join(map(text_of, client.stream(path, **body, stop=stop))) == upto


CALL = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
NESTED = json.loads('{"a":' * 900 + "1" + "}" * 900)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *(("chat/completions", {"messages": messages}, param) for messages, param in [
            ([], "messages"),
            (["hello"], "messages[0]"),
            ([{"role": "robot", "content": "hello"}], "messages[0].role"),
            ([{"role": "user"}], "messages[0].content"),
            ([{"role": "user", "content": ""}], "messages"),
            ([{"role": "user", "content": "hello", "name": "Ann"}], "messages[0].name"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
            ([{"role": "tool", "content": "5"}], "messages[0].tool_call_id"),
        ]),
        *(("chat/completions", {"messages": CHAT, **fields}, next(iter(fields))) for fields in [
            {"n": 2},
            {"tools": [{"type": "function", "function": {"name": "add"}}]},
            {"tool_choice": "required"},
            {"temperature": -1},
            {"frequency_penalty": 3},
            {"logit_bias": {"4096": 1}},
            {"max_completion_tokens": 5000},
            {"stop": list("abcde")},
            {"stream_options": {"include_usage": True}},
            {"top_k": 5},
            {"generation_config": "{"},
            {"generation_config": "[" * 100_000},
        ]),
        *(("responses", {"input": "word", "generation_config": text}, f"generation_config.{name}") for text, name in [
            ('{"num_beams": 2}', "num_beams"),
            ('{"eos_token_id": "x"}', "eos_token_id[0]"),
            ('{"temperature": NaN}', "temperature"),
        ]),
        ("responses", {"input": "word", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        *(("chat/completions", {"messages": CHAT, "chat_template_kwargs": options}, param) for options, param in [
            *(({name: 1}, f"chat_template_kwargs.{name}") for name in ("padding", "messages", "tools", "tokenize")),
            (NESTED, None),
        ]),
        *(("completions", fields, param) for fields, param in [
            ({}, "prompt"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": ["one", "two"]}, "prompt"),
            ({"prompt": "word " * 5000}, "prompt"),
            ({"prompt": "word " * 1_000_000}, "prompt"),
            ({"prompt": "word", "logit_bias": {"9" * 5000: 1}}, f"logit_bias.{'9' * 5000}"),
            ({"prompt": "word", "logit_bias": {"-1": 1}}, "logit_bias.-1"),
            ({"prompt": "word", "max_tokens": 0}, "max_tokens"),
            ({"prompt": "word", "logprobs": 0}, "logprobs"),
        ]),
        *(("responses", fields, param) for fields, param in [
            ({}, "input"),
            ({"input": ""}, "input"),
            ({"input": [{"role": "user"}]}, "input[0].content"),
            ({"input": [{"role": "tool", "content": "5"}]}, "input[0].role"),
            ({"input": [{"type": "reasoning"}]}, "input"),
            ({"input": "word", "tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"input": "word", "max_output_tokens": 5000}, "max_output_tokens"),
        ]),
        (
            "responses",
            {"input": "word", "stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_name(client, path, body, param):
    status, error = client.refused(f"/v1/{path}", **body)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)


def test_fields_that_change_nothing_are_accepted(client, expected, asked):
    same = {
        "n": 1,
        "repetition_penalty": 1.0,
        "logprobs": False,
        "response_format": {"type": "text"},
        "stop": None,
        "user": "ann",
    }
    assert text_of(client.post("/v1/completions", **asked["/v1/completions"], **same)) == expected["+int4"]


def test_bodies_methods_and_routes_that_there_are_not(client):
    for body in (b"{", b"5"):
        with pytest.raises(HTTPError) as refused:
            client._open(client._address + "/v1/completions", body, timeout=TIMEOUT)
        assert (refused.value.code, json.load(refused.value)["error"]["param"]) == (400, None)
    with pytest.raises(HTTPError) as refused:
        client.get("/v1/completions")
    assert (refused.value.code, refused.value.headers["Allow"]) == (405, "POST")
    assert client.refused("/v1/embeddings", input="word")[0] == 404


def test_sampling(client, question):
    def say(prompt="The captain", **choice):
        return client.post("/v1/completions", prompt=prompt, max_tokens=8, **choice)["choices"][0]["text"]

    hot = {"temperature": 2, "seed": 1}
    assert say(**hot) == say(**hot)
    assert say(**hot) != say(**hot | {"seed": 2})
    assert say(**hot, top_p=0) == say(temperature=0) == say()
    assert (
        say(temperature=1e-300, seed=1) == say(generation_config='{"do_sample": true, "temperature": 1e-300}') == say()
    )
    assert say(logit_bias={"5": 100}) == say(logit_bias={"5": 100}, presence_penalty=2) != say()
    assert say(question, logit_bias={"5": 3.5}, frequency_penalty=2) != say(question, logit_bias={"5": 3.5})


def test_a_request_without_a_seed_does_not_repeat_after_one_with_a_seed(client):
    body = {"prompt": "The captain", "max_tokens": 8, "temperature": 2}
    said = [text_of(client.post("/v1/completions", **body, **seed)) for seed in ({"seed": 1}, {}) * 2]
    assert said[0] == said[2]
    assert len({*said}) == 3


def test_an_answer_that_ignores_its_end(client):
    """The bias makes the token that ends an answer the first choice."""
    eos = load_model(str(DEMO_MODEL), dtype="float32", device="cpu").model.generation_config.eos_token_id
    body = {"prompt": "The captain", "max_tokens": 3, "temperature": 0, "logit_bias": {str(eos): 100}}
    assert client.post("/v1/completions", **body)["usage"]["completion_tokens"] == 1
    assert client.post("/v1/completions", **body, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_a_client_that_leaves_frees_its_request(client):
    """Otherwise the next answer would wait for 3,000 tokens, which take minutes."""
    body = {"prompt": "The captain", "max_tokens": 3000}
    with pytest.raises(TimeoutError):
        client.post("/v1/completions", **body, timeout=0.5)
    assert client.post("/v1/completions", prompt="The captain", max_tokens=2, timeout=20)["usage"]
    with client._post("/v1/completions", body | {"stream": True}) as response:
        assert response.readline().startswith(b"data: ")
    assert client.post("/v1/completions", prompt="The captain", max_tokens=2, timeout=20)["usage"]


def test_the_openai_client(client, expected, question):
    asked = openai.OpenAI(base_url=f"{client._address}/v1", api_key="none", max_retries=0)
    (model,) = asked.models.list().data
    answer = asked.responses.create(model=model.id, input=question, max_output_tokens=NEW_TOKENS)
    assert answer.output_text == expected["+int4"]
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    *_, last = asked.responses.create(model=model.id, input="word", max_output_tokens=1, stream=True)
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    with pytest.raises(openai.BadRequestError) as refused:
        asked.completions.create(model=model.id, prompt="word " * 5000)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


def test_the_model_is_the_only_one(client, folder):
    (entry,) = client.get("/v1/models")["data"]
    assert entry["id"] == str(folder)
    assert (entry["status"], entry["dtype"], entry["max_model_len"]) == ({"value": "loaded"}, "float32", 4096)
    assert entry["attention"].endswith("+int4")
    assert client.get(f"/v1/models/{folder}") == entry
    status, error = client.refused("/v1/completions", prompt="word", model="another")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert client.stream("/load_model", model=str(folder))[0]["status"] == "ready"  # as `transformers chat` begins
    assert client.stream("/load_model", model="another")[0]["status"] == "error"
    assert client.refused("/load_model", model=5)[1]["param"] == "model"


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("completions", {"prompt": "The captain", "max_tokens": 2}, None),
        ("chat/completions", {"messages": CHAT, "max_tokens": 2}, "org/tiny"),
        ("responses", {"input": "The captain", "max_output_tokens": 2}, "org/tiny"),
    ],
)
def test_a_model_that_is_loaded_already_is_served(folder, path, body, name):
    """As the guide shows it for Python. Transformers would add a revision to the name."""
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    gate = make_app(Sequential(loaded.model, loaded.tokenizer), name=name)
    assert asyncio.run(answer_to(gate, f"/v1/{path}", **body))["model"] == (name or str(folder))


def _scripted(folder, said, end="<|im_start|>assistant{{ '\\n' }}"):
    """Return the application of a model that answers ``said``, and whose prompts end with ``end``."""
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    loaded.tokenizer.chat_template = "{% if tools %}{{ tools }}{% endif %}" + TEMPLATE + end
    loaded.model.config.model_type = "qwen3"  # whose response template Transformers knows
    return make_app(Scripted(loaded.model, loaded.tokenizer, said), name="tiny")


def _asked_for_tools(folder, said, *end, **fields):
    """Ask a model that says ``said`` for a chat with tools. Return the status and the answer."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    body = {"messages": CHAT, "tools": tools, "max_tokens": 100} | fields
    gate, sent = _scripted(folder, said, *end), []
    return asyncio.run(status_of(gate, "/v1/chat/completions", "POST", body=json.dumps(body).encode(), sent=sent)), sent


def _say(*arguments, **fields):
    """Return the message of an answer, joined from pieces if it is streamed, and why it ended."""
    status, sent = _asked_for_tools(*arguments, **fields)
    assert status == 200
    text = b"".join(message.get("body", b"") for message in sent).decode()
    if not fields.get("stream"):
        (choice,) = json.loads(text)["choices"]
        return choice["message"], choice["finish_reason"]
    choices = [json.loads(event[6:])["choices"][0] for event in text.split("\n\n") if event.startswith("data: {")]
    deltas = [choice["delta"] for choice in choices]
    message = {name: "".join(each.get(name, "") for each in deltas) for name in ("content", "reasoning_content")}
    calls = [call for each in deltas for call in each.get("tool_calls", ())]
    return message | {"tool_calls": calls}, choices[-1]["finish_reason"]


ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning_and_tool_calls_are_parsed(folder, is_streamed):
    message, reason = _say(folder, f"<think>one and one</think>\n{ADD}", stream=is_streamed)
    assert (message["reasoning_content"], reason) == ("one and one", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ("Aye", ["message"]),
        ("", ["message"]),
        (ADD, ["function_call"]),
        (f"Aye {ADD}{ADD}", ["message", "function_call", "function_call"]),
        (f"<think>one and one</think>Aye {ADD} so", ["reasoning", "message", "function_call", "message"]),
        ("<think>one and", ["reasoning"]),
    ],
)
def test_the_openai_client_assembles_the_items_of_a_streamed_response(folder, said, kinds):
    """They are those of the answer at once. A later request takes them as input."""
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
    with listening(_scripted(folder, said)) as address:
        responses = openai.OpenAI(base_url=address, api_key="none", max_retries=0).responses
        asked = {"model": "tiny", "input": "word", "tools": tools, "max_output_tokens": 100}
        whole = responses.create(**asked)
        with responses.stream(**asked) as stream:
            events = list(stream)
            last = stream.get_final_response()
        question, calls = {"role": "user", "content": "word"}, [item for item in last.output if "call" in item.type]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"} for call in calls]
        turns = [question, *(item.model_dump(exclude_none=True) for item in last.output)]
        assert responses.create(**asked | {"input": [*turns, *results, question]}).status == "completed"
    assert [item.type for item in last.output] == [item.type for item in whole.output] == kinds
    assert [event.sequence_number for event in events] == [*range(len(events))]
    added, done = (
        [each for each in events if each.type == f"response.output_item.{step}"] for step in ("added", "done")
    )
    assert [each.output_index for each in added] == [each.output_index for each in done] == [*range(len(kinds))]
    assert [each.item.id for each in done] == [item.id for item in last.output]
    assert len({item.id for item in last.output}) == len(kinds)
    assert [call.arguments for call in calls] == ['{"a": 1}'] * kinds.count("function_call")
    texts = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert texts == last.output_text == whole.output_text


@pytest.mark.parametrize("said", ["Aye", ADD, f"<think>one and one</think>Aye {ADD}"])
def test_the_message_that_the_openai_client_assembles_from_a_stream_is_accepted_in_a_later_request(folder, said):
    """Its tool calls have an index, which others lack."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    with listening(_scripted(folder, said)) as address:
        completions = openai.OpenAI(base_url=address, api_key="none", max_retries=0).chat.completions
        asked = {"model": "tiny", "messages": CHAT, "tools": tools, "max_tokens": 100}
        with completions.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0].message
        assert bool(message.tool_calls) == (ADD in said)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls or ()]
        for same in (message, message.model_dump()):
            assert completions.create(**asked | {"messages": [*CHAT, same, *results]}).choices


def test_a_template_sees_the_name_of_a_tool_beside_its_result(folder):
    """Many clients send it, because OpenAI's interface once required it."""
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    loaded.tokenizer.chat_template = "{% for message in messages %}{{ message.name or message.content }}{% endfor %}"
    gate = make_app(Scripted(loaded.model, loaded.tokenizer))
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "name": "captain " * 20, "content": "2"}
    messages = [*CHAT, {"role": "assistant", "tool_calls": [call]}, result]
    answer = asyncio.run(answer_to(gate, "/v1/chat/completions", messages=messages))
    assert answer["usage"]["prompt_tokens"] > 20


@pytest.mark.parametrize("wrong", ['{"name": add}', '{"name": "add"}', '{"foo": 1}', "[1]", '"add"'])
@pytest.mark.parametrize("end", ["</tool_call>", ""])
def test_a_malformed_tool_call_is_text(folder, wrong, end):
    """Small models write them often. The answer must not fail, and later calls are still calls."""
    later = f" and {ADD}" if end else ""
    message, reason = _say(folder, f"So <tool_call>{wrong}{end}{later}")
    assert message["content"] == f"So{wrong}" + " and" * bool(later)
    assert (len(message.get("tool_calls", ())), reason) == ((1, "tool_calls") if later else (0, "stop"))


def test_an_answer_that_is_cut_off_after_a_tool_call_says_so(folder):
    message, reason = _say(folder, f"{ADD}\n<tool_call>", max_tokens=20)
    assert (len(message["tool_calls"]), reason) == (1, "length")


def test_a_chat_format_that_the_parser_does_not_know_leaves_the_text_as_it_is(folder):
    """Transformers chooses the parser by the model type. DeepSeek-R1-Distill-Qwen has another chat format than Qwen."""
    message, reason = _say(folder, ADD, "Assistant:", tools=None)
    assert (message["content"], reason) == (ADD, "stop")
    status, sent = _asked_for_tools(folder, ADD, "Assistant:")
    assert (status, json.loads(sent[-1]["body"])["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("first", [{"role": "developer", "content": "Be kind."}, CALL], ids=["message", "call"])
def test_instructions_replace_nothing_of_the_input(folder, monkeypatch, first):
    loaded, seen = load_model(str(folder), dtype="float32", device="cpu"), []
    apply = loaded.tokenizer.apply_chat_template

    def note(messages, **options):
        seen.extend((each["role"], each["content"]) for each in messages)
        return apply(messages, **options)

    monkeypatch.setattr(loaded.tokenizer, "apply_chat_template", note)
    body = {"input": [first, {"role": "user", "content": "Hello"}], "instructions": "Be brief."}
    gate = make_app(Scripted(loaded.model, loaded.tokenizer))
    assert asyncio.run(status_of(gate, "/v1/responses", "POST", body=json.dumps(body).encode())) == 200
    begun = ("assistant", "") if first is CALL else ("system", "Be kind.")
    assert seen == [("system", "Be brief."), begun, ("user", "Hello")]


def test_an_input_that_begins_with_a_call_is_refused(folder):
    """Transformers would take all of it for the parts of one message, and drop them."""
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    loaded.tokenizer.chat_template = "{{ messages }}"
    body = {"input": [CALL, {"role": "user", "content": "Hello"}]}
    gate = make_app(Scripted(loaded.model, loaded.tokenizer))
    assert asyncio.run(status_of(gate, "/v1/responses", "POST", body=json.dumps(body).encode())) == 400


def test_others_are_answered_while_a_prompt_is_tokenized(folder, monkeypatch):
    loaded, is_free = load_model(str(folder), dtype="float32", device="cpu"), threading.Event()
    apply = loaded.tokenizer.apply_chat_template

    def wait(*arguments, **options):
        assert is_free.wait(TIMEOUT)
        return apply(*arguments, **options)

    async def ask():
        monkeypatch.setattr(loaded.tokenizer, "apply_chat_template", wait)
        gate, body = make_app(Scripted(loaded.model, loaded.tokenizer)), {"messages": CHAT, "max_tokens": 100}
        asking = asyncio.create_task(status_of(gate, "/v1/chat/completions", "POST", body=json.dumps(body).encode()))
        await asyncio.sleep(0)
        health = await status_of(gate, "/health")
        is_waiting = not asking.done()
        is_free.set()
        return health, is_waiting, await asking

    assert asyncio.run(ask()) == (200, True, 200)
