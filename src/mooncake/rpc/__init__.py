"""What processes say to each other, and how: framing, typed messages, server loop, blocking client."""
