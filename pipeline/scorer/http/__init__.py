"""Parts of a reward that a server computes: language models that judge, reward models. Imported only where a run file
names one. The one place of ``pipeline`` that speaks HTTP (ARCHITECTURE.md says why)."""
