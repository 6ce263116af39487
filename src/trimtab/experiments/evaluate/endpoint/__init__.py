"""Samples from any OpenAI-compatible server: single responses, or conversations with tools."""

from trimtab.experiments.evaluate.endpoint.connection import EndpointConnection, EndpointError
from trimtab.experiments.evaluate.endpoint.generator import EndpointGenerator

__all__ = ["EndpointConnection", "EndpointError", "EndpointGenerator"]
