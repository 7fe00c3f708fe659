"""BLAS is held to one thread while ours multiply, and gets its own back."""

import threading

import pytest
from threadpoolctl import threadpool_limits

from ropegrad.backends import blas
from ropegrad.backends.blas import one_thread


def blas_threads():
    """Of NumPy's BLAS; another library's, loaded since, is none of our business."""
    shared, own = blas._libraries()
    return [library.num_threads for library in (*shared, *own)]


def test_blas_gets_its_threads_back_after_the_last_of_several_calls():
    with threadpool_limits(3, "blas"):
        before = blas_threads()
        entered, leave = threading.Event(), threading.Event()

        def hold():
            with one_thread():
                entered.set()
                leave.wait(30)

        other = threading.Thread(target=hold)
        with one_thread():
            other.start()
            assert entered.wait(30)
        assert set(blas_threads()) == {1}  # the other call is still under way
        leave.set()
        other.join()
        assert blas_threads() == before != [1]

        def fail():
            with one_thread():
                raise ValueError("planted")

        with pytest.raises(ValueError, match="planted"):
            fail()
        assert blas_threads() == before


def test_a_number_that_is_a_threads_own_is_set_and_restored_in_each_thread(monkeypatch):
    class Library(threading.local):
        num_threads = 5

        def set_num_threads(self, count):
            self.num_threads = count

    library = Library()
    monkeypatch.setattr(blas, "_libraries", lambda: ([], [library]))
    seen = []

    def multiply():
        with one_thread(), one_thread():
            seen.append(library.num_threads)
        seen.append(library.num_threads)

    with one_thread():
        other = threading.Thread(target=multiply)
        other.start()
        other.join()
        assert library.num_threads == 1
    assert library.num_threads == 5
    assert seen == [1, 5]
