"""The JSON schema of the privacy card, as it is published.

python -m privacy.card.schema > docs/schemas/privacy_card.schema.json
"""

import json

from .model import PrivacyCard


def schema_text() -> str:
    """The schema of the files `privacy_card.json`, in which every key is present."""
    schema = PrivacyCard.model_json_schema(mode="serialization")
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
