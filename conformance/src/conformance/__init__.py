"""The language-neutral conformance suite of the Volcano lock servers and SDKs.

    scenario -> play -> {driver, gate, target, match}        one scenario, one column
    cli -> suite -> play                                     many, at once
    cli -> {lint, report} -> {scenario, discovery}

`docs`, drivers and the scenario format: conformance/README.md and conformance/protocol.md.
"""

from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
"""The directory `conformance/` of the repository: scenarios, tables and schemas live there."""
