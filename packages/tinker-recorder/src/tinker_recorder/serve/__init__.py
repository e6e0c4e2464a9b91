"""An OpenAI-compatible server over a Tinker sampling client, with `/records` on the same port.

Needs the extra `tinker-recorder[serve]`.
"""

from tinker_recorder.serve.app import create_app
from tinker_recorder.serve.rendering import Rendering
from tinker_recorder.serve.samplers import SamplerPool, connect

__all__ = ["Rendering", "SamplerPool", "connect", "create_app"]
