"""placeholder"""
def complaints() -> list[str]:
    return []
