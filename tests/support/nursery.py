"""Import what ranks need, in the process that they are forked from."""

import pytest  # noqa: F401 - the test modules that ranks import do
import torch._dynamo  # noqa: F401 - the first optimizer of torch would import it, in two seconds

import harness_worker
import zeromesh.build
import zeromesh.engine.engine  # noqa: F401

harness_worker.freeze_imports()
