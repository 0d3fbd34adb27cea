from tests.support.one_thread import one_thread as one_thread
