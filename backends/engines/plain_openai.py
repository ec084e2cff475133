"""Any server with the OpenAI routes and nothing else: no metrics, no `/health`, and sometimes no `[DONE]`."""

from backends.engines.dialect import Dialect, no_metrics

DIALECT = Dialect(name="openai", parse_metrics=no_metrics, metrics_path=None, health_path="/v1/models",
                  ends_with_done=False)
