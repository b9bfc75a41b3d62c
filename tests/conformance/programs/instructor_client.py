"""Checks with instructor: structured answers by tools, by JSON, by schemas, streamed and nested."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import instructor
import openai
from pydantic import BaseModel, Field

from tests.conformance.checks import MODEL, CheckList, Endpoint

check = CheckList(("instructor", "openai"))
ADA = {"name": "Ada", "age": 36}
QUESTION: Any = [{"role": "user", "content": "Extract: Ada is 36 years old."}]


class User(BaseModel):
    """A person."""

    name: str
    age: int


class Opinion(StrEnum):
    """A closed set of values."""

    GOOD = "good"
    BAD = "bad"


class Review(BaseModel):
    """An answer with a nested list, an enumeration and an optional member."""

    opinion: Opinion
    authors: list[User]
    note: str | None = None


class Adult(BaseModel):
    """An answer with a rule that the schema has as well."""

    age: int = Field(ge=18, le=120)


def connect(endpoint: Endpoint, mode: instructor.Mode) -> Any:
    client = openai.OpenAI(base_url=endpoint.url, api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode)


def _is_extracted(endpoint: Endpoint, mode: instructor.Mode) -> None:
    user = connect(endpoint, mode).create(
        model=MODEL, response_model=User, messages=QUESTION, max_retries=1
    )
    assert user.model_dump() == ADA


@check
def a_user_is_extracted_by_a_tool(endpoint: Endpoint) -> None:
    _is_extracted(endpoint, instructor.Mode.TOOLS)


@check
def a_user_is_extracted_by_a_strict_tool(endpoint: Endpoint) -> None:
    _is_extracted(endpoint, instructor.Mode.TOOLS_STRICT)


@check
def a_user_is_extracted_by_a_schema(endpoint: Endpoint) -> None:
    _is_extracted(endpoint, instructor.Mode.JSON_SCHEMA)


@check
def a_nested_answer_is_extracted(endpoint: Endpoint) -> None:
    review = connect(endpoint, instructor.Mode.TOOLS).create(
        model=MODEL,
        response_model=Review,
        messages=[{"role": "user", "content": "A bad book by Ada, 36."}],
        max_retries=1,
    )
    assert review.opinion is Opinion.BAD
    assert [author.model_dump() for author in review.authors] == [ADA]


@check
def bounds_of_a_number_are_kept(endpoint: Endpoint) -> None:
    adult = connect(endpoint, instructor.Mode.TOOLS).create(
        model=MODEL,
        response_model=Adult,
        messages=[{"role": "user", "content": "He is 7."}],
        max_retries=1,
    )
    assert adult.age == 18


@check
def a_partial_answer_streams_and_grows(endpoint: Endpoint) -> None:
    parts = list(
        connect(endpoint, instructor.Mode.TOOLS).create_partial(
            model=MODEL, response_model=User, messages=QUESTION
        )
    )
    assert len(parts) > 1
    assert (parts[-1].name, parts[-1].age) == ("Ada", 36)


@check
def a_list_of_answers_streams(endpoint: Endpoint) -> None:
    users = list(
        connect(endpoint, instructor.Mode.TOOLS).create_iterable(
            model=MODEL, response_model=User, messages=QUESTION
        )
    )
    assert [user.model_dump() for user in users] == [ADA]


@check
def the_completion_comes_beside_the_answer(endpoint: Endpoint) -> None:
    user, completion = connect(endpoint, instructor.Mode.TOOLS).create_with_completion(
        model=MODEL, response_model=User, messages=QUESTION
    )
    assert user.age == 36
    assert completion.usage.completion_tokens > 0


@check
async def the_asynchronous_client_extracts(endpoint: Endpoint) -> None:
    client = openai.AsyncOpenAI(base_url=endpoint.url, api_key="none", max_retries=0)
    user = await instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).create(
        model=MODEL, response_model=User, messages=QUESTION, max_retries=1
    )
    assert user.model_dump() == ADA


if __name__ == "__main__":
    check.main()
