"""The layers between the wire and the endpoints: HTTP itself, and what every request goes through. Know no endpoint."""
