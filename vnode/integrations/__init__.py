"""Thin bridges to other libraries; each imports its library and nothing in vnode's core imports it."""
