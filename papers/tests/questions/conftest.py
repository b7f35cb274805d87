"""Questions are read by the tokenizers that the tests of ``comingle.data`` have."""

from tests.data.conftest import gpt2_tokenizer as gpt2_tokenizer
from tests.data.conftest import make_word_tokenizer as make_word_tokenizer
from tests.data.conftest import word_tokenizer as word_tokenizer
