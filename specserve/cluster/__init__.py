"""Actors, links between them, and deployments: the only rooms that know Ray."""
