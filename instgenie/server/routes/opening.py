"""Opens the pictures of a request: the edited one with its mask, references, and images for ControlNets. Knows in which
order they are admitted and decoded."""

from instgenie.errors import ClosedError, ControlError, InstGenieError, MaskError, PictureError
from instgenie.pictures.header import Header, decoding_bytes, kept_bytes
from instgenie.pictures.photo import Photo
from instgenie.server.admission import Admitted
from instgenie.server.bodies.controls import is_word
from instgenie.server.bodies.fields import ImageFields, answer_size
from instgenie.server.bodies.forms import EditForm, decode_data_url
from instgenie.server.bodies.pictures import EditSources, decode_control, decode_edit, decode_reference
from instgenie.server.errors import ApiError, bad, closed, echo, from_control_error, from_user_error, not_found
from instgenie.server.service import SECONDS_TO_LOAD, HttpService
from instgenie.types import PixelMask, Pixels


async def open_edit(service: HttpService, tenant: str, edit: EditForm, admitted: Admitted) -> tuple[Photo, PixelMask]:
    """Decode the picture and the mask of an edit, once the headers show that there is room for both."""
    fields, decoder = edit.fields, service.decoder
    size = answer_size(fields.size, decoder.max_pixels)
    try:
        headers = [await decoder.header(edit.mask, MaskError)] if edit.mask else []
        if edit.image is None:
            name = fields.template or ""
            own = template_header(service, tenant, name)
            admitted.keep(kept_bytes(own, size))
            image: bytes | Pixels = await template_picture(service, tenant, name)
        else:
            own = await decoder.header(edit.image, PictureError)
            admitted.keep(kept_bytes(own, size))
            image = edit.image
        sources = EditSources(
            image, edit.mask, fields.mask_mode, size, fields.fit, fields.metadata, fields.reads_alpha, edit.notes
        )
        return await admitted.decode(decoding_bytes(own, *headers), decode_edit, sources, decoder.max_pixels)
    except InstGenieError as error:
        raise from_user_error(error) from None


async def open_references(service: HttpService, edit: EditForm, admitted: Admitted) -> tuple[Pixels, ...]:
    """Decode the pictures that the model looks at beside the edited one, one after the other."""
    decoder, found = service.decoder, []
    try:
        for encoded in edit.references:
            header = await decoder.header(encoded, PictureError)
            admitted.keep(kept_bytes(header, None))
            found.append(await admitted.decode(decoding_bytes(header), decode_reference, encoded, decoder.max_pixels))
    except InstGenieError as error:
        raise from_user_error(error) from None
    return tuple(found)


async def open_controls(
    service: HttpService, admitted: Admitted, fields: ImageFields, picture: Pixels
) -> tuple[Pixels, ...]:
    """Decode or make the images of a request's ControlNets, one after the other."""
    images = []
    own = Header(picture.shape[1], picture.shape[0])
    for control in fields.controls:
        admitted.keep(kept_bytes(own, None))
        try:
            image: str | bytes = control["image"]
            header = own
            if isinstance(image, str) and not is_word(image):
                image = await service.decoder.run(decode_data_url, "controls", image)
                header = await service.decoder.header(image, PictureError)
            max_pixels = service.config.max_pixels
            needed = decoding_bytes(own, header)
            images.append(await admitted.decode(needed, decode_control, image, picture, max_pixels))
        except ControlError as error:
            raise from_control_error(error) from None
        except PictureError as error:
            raise bad("controls", f"The control image cannot be used: {error}.") from None
    return tuple(images)


def template_header(service: HttpService, tenant: str, name: str) -> Header:
    status = service.cluster.template(tenant, name)
    if status is None:
        raise not_found("template", name, "template_not_found", "template")
    return Header(status.width, status.height)


async def template_picture(service: HttpService, tenant: str, name: str) -> Pixels:
    try:
        picture = await service.cluster.picture(tenant, name)
    except ClosedError:
        raise closed("The template's picture cannot be read at present.", SECONDS_TO_LOAD, "unavailable") from None
    if picture is None:
        message = f"The picture of the template {echo(name)} is no longer kept: send it as the image."
        raise ApiError(404, message, "template_picture_dropped", "template")
    return picture
