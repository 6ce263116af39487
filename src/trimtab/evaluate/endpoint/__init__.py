"""Samples from any OpenAI-compatible server: single responses, or conversations with tools."""

from trimtab.evaluate.endpoint.connection import EndpointConnection, EndpointError
from trimtab.evaluate.endpoint.generator import EndpointGenerator

__all__ = ["EndpointConnection", "EndpointError", "EndpointGenerator"]
