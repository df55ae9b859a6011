"""Sentences for people: each has an id, values and one text a language in the catalogue beside this file."""

from sqrtdk.messages._catalogue import Text as Text
from sqrtdk.messages._catalogue import add_words as add_words
from sqrtdk.messages._catalogue import catalogue_text as catalogue_text
from sqrtdk.messages._catalogue import entries as entries
from sqrtdk.messages._catalogue import faults as faults
from sqrtdk.messages._catalogue import in_language as in_language
from sqrtdk.messages._catalogue import placeholders as placeholders
from sqrtdk.messages._catalogue import quoted as quoted
from sqrtdk.messages._catalogue import unfilled as unfilled
from sqrtdk.messages._message import Message as Message
from sqrtdk.messages._message import capitalised as capitalised
from sqrtdk.messages._message import fields as fields
from sqrtdk.messages._message import id_of as id_of
from sqrtdk.messages._message import joined as joined
from sqrtdk.messages._message import mentions as mentions
from sqrtdk.messages._message import named as named
from sqrtdk.messages._message import recorded as recorded
from sqrtdk.messages._message import said as said
from sqrtdk.messages._message import said_again as said_again
from sqrtdk.messages._message import table_of as table_of
from sqrtdk.messages._message import text_of_value as text_of_value
from sqrtdk.messages._message import word as word
