"""OpenAI's newer interface, `/v1/responses`: a list of items in, a list of items out."""
