import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for what test files share: async_stage

from sync_stage import stage

__all__ = ["stage"]
