"""Where models come from: what they are (`facts`), what a hub has (`hub`), their files here (`fetch`)."""
