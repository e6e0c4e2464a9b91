RULES = {"even": 0, "odd": 0, "low": 0, "high": 0}
