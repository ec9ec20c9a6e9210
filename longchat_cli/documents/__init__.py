"""Files, folders and standard input to text with locations. Imports neither torch nor transformers."""

from longchat_cli.documents.document import Collection, Document, Location, Skip
from longchat_cli.documents.member import Options
from longchat_cli.documents.reading import read
from longchat_cli.documents.remote import is_remote

__all__ = ["Collection", "Document", "Location", "Options", "Skip", "is_remote", "read"]
