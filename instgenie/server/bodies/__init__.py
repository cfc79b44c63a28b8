"""Request and answer bodies: how they are read and decoded, which fields they have, and how OpenAPI describes them."""
