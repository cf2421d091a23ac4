"""Model, games, MCP server and repositories for configs/game_cpu.yaml, mcp_cpu.yaml and coding_cpu.yaml."""
