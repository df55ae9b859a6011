"""Trace files: the tensors of every attention of a run in one safetensors file, which any program can write.

docs/en/trace-file.md describes the format. `record` runs a model and writes such a file; `read_trace_file` reads it.
"""

from sqrtdk._leads import says_if_called as _says_if_called
from sqrtdk.recording.read import read_trace_file as read_trace_file
from sqrtdk.recording.records import Cut as Cut
from sqrtdk.recording.records import Recording as Recording
from sqrtdk.recording.records import Shard as Shard
from sqrtdk.recording.records import TraceFile as TraceFile
from sqrtdk.recording.records import TraceMetadata as TraceMetadata
from sqrtdk.recording.write import write_trace_file as write_trace_file

_says_if_called(__name__)
