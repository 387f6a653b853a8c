"""The language-neutral conformance suite: scenarios, the gate and the runner that plays them."""
