"""Locks of what is installed, with hashes, and what is made of them: the SBOM and the audit."""
