"""An OpenAI-compatible server on the rollout engine: same bits, same weight versions, over HTTP."""
