"""What configs/game_cpu.yaml, mcp_cpu.yaml and coding_cpu.yaml run on, made here."""
